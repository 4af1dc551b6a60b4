// Puts the parts together: which rank is shown, at which step.

const data = JSON.parse(document.getElementById("data").textContent);
const documents = data.document.ranks ?? [data.document];
const find = (selector) => document.querySelector(selector);
const tableAt = (name) => find(`[data-table="${name}"]`);
const chartAt = (name) => find(`[data-chart="${name}"]`);
const unique = (values) => [...new Set(values)];
const KINDS = { output: "module outputs", gradient: "gradients of outputs", parameter: "gradients of parameters" };
let chosen = data.chosen;
let health = null; // the table of numeric health, while there is one

const here = () => documents[chosen];

function show() {
  document.querySelectorAll(".part").forEach((part) => { part.hidden = Number(part.dataset.part) !== chosen; });
  const { trace, steps } = here();
  section("time", steps.some((step) => step.loss !== null || step.scale !== null));
  section("modules", trace?.rows.length);
  section("exponents", here().health?.modules.length);
  find("#exponents .empty").textContent = here().health ? "No step was counted." : "Numbers were not watched.";
  skippedTable(steps.filter((step) => step.skipped));
  rowsTable(trace?.rows ?? []);
  flowTable(trace?.flow ?? []);
  drawTree(find(".tree"), data.parts[chosen].tree);
  drawLegend(find(".legend"), data.parts[chosen].tree);
  health = null;
  chooseHealth();
  charts();
}

function charts() {
  drawSteps(chartAt("steps"), here().steps);
  showHealth();
}

function section(id, filled) {
  for (const child of find(`#${id}`).children) {
    if (child.matches(".empty")) child.hidden = Boolean(filled);
    else if (child.matches(".controls, .legend, .tree, .chart, .heat-note, [data-table=health]")) child.hidden = !filled;
  }
}

const text = (title, key, more = {}) => ({ title, value: (row) => row[key], show: (row) => row[key] ?? "-", ...more });
const amount = (title, key, show, more = {}) => ({ title, number: true, value: (row) => row[key], show: (row) => show(row[key]), ...more });

function rowsTable(rows) {
  new Table(tableAt("rows"), {
    caption: "Operations that were traced: one row for each place, operation and dtypes", rows, sort: 8, empty: "No operation was traced.",
    columns: [text("Operation", "op"), { ...text("Module", "module", { name: true }), show: (row) => row.module || (row.module === null ? "-" : "the model") },
      text("Phase", "phase", { wide: true, word: true }), dtypes("Inputs", "inputs"), dtypes("Output", "output"),
      text("Rule", "rule", { wide: true, word: true }), amount("Calls", "calls", number, { wide: true }), amount("Casts", "casts", number, { wide: true }),
      amount("Time", "seconds", duration), amount("Time of casts", "cast_seconds", duration, { wide: true }),
      text("Source", "source", { wide: true })],
    search: (row) => [row.op, row.module, row.phase, ...row.inputs, ...row.output, row.rule, row.reason, row.source, row.region, row.module_rule],
    detail: (row) => [["Reason", row.reason && marked(row.reason)], ["Source", row.source], ["Region opened at", row.region], ["Rule for modules", row.module_rule],
      ["Phase", row.phase], ["Inputs", row.inputs.join(", ")], ["Output", row.output.join(", ")], ["Device", row.device_type ?? null],
      ["Calls", number(row.calls)], ["Casts", `${number(row.casts)} (${size(row.cast_bytes)}, ${duration(row.cast_seconds)})`],
      ["Casts that the cache saved", number(row.cached)]],
  });
}

function dtypes(title, key) {
  return { title, wide: true, value: (row) => row[key].join(" "), show: (row) => chips(unique(row[key])) };
}

function skippedTable(rows) {
  const all = here().run.skipped ?? rows.length;
  new Table(tableAt("skipped"), {
    caption: `Steps that were skipped, as gradients were not finite${all > rows.length ? `: ${number(rows.length)} of ${number(all)}` : ""}`, rows,
    empty: all ? `${number(all)} were skipped; none of them was kept.` : "No step was skipped.",
    columns: [amount("Step", "step", number), amount("Scale", "scale", scientific),
      { title: "First that was not finite", name: true, value: (row) => row.first?.name, show: (row) => (row.first ? row.first.name || "the model" : "-") },
      { title: "Parameters", wide: true, value: (row) => row.names.length, show: (row) => few(row.names) || "-" }],
    search: (row) => [row.step, row.first?.name, ...row.names],
    detail: (row) => [["What", row.first && marked(row.first.message)], ...(row.first?.inputs ?? []).map((input, place) => [
      input.of ? marked(input.of) : `Input ${place + 1}`, range(input)]), ["Parameters", row.names.join(", ")]],
  });
}

function range({ dtype, minimum, maximum, rms, nonfinite }) { // of a tensor, as far as it is known
  const ends = nonfinite ? "not finite" : `from ${scientific(minimum)} to ${scientific(maximum)}`;
  return `${dtype}, ${ends}${rms == null ? "" : `, root mean square ${scientific(rms)}`}`;
}

function flowTable(rows) {
  new Table(tableAt("flow"), {
    caption: "Casts between dtypes in what was traced", rows, sort: 2, empty: "No cast was traced.",
    columns: [{ ...text("From", "from"), show: (row) => chip(row.from) }, { ...text("To", "to"), show: (row) => chip(row.to) },
      amount("Casts", "casts", number), amount("Bytes", "bytes", size), amount("Time", "seconds", duration, { wide: true })],
  });
}

function ranksTable() {
  new Table(tableAt("ranks"), {
    caption: "The processes of this run", rows: data.parts.map((part) => part.numbers), sort: 0, descending: false,
    columns: [amount("Rank", "rank", number), text("Ended", "ended", { wide: true }), amount("Steps", "steps", number, { wide: true }),
      amount("Skipped", "skipped", number), amount("Time", "seconds", duration), amount("In 16 bits", "lower", share, { wide: true }),
      amount("On casts", "casting", share, { wide: true }), { ...text("First that was not finite", "first"), show: (row) => (row.first ? marked(row.first) : "-") }],
    search: (row) => [row.rank, row.ended, row.first],
  });
}

// --- numeric health ---

function chooseHealth() {
  const modules = here().health?.modules ?? [];
  options(find("#kind"), unique(modules.map((module) => module.kind)).map((kind) => [kind, KINDS[kind]]));
  options(find("#format"), Object.keys(FORMATS).map((format) => [format, format]));
  if (here().health && here().health.format in FORMATS) find("#format").value = here().health.format;
  const steps = watchedSteps();
  find("#step").max = Math.max(0, steps.length - 1);
  find("#step").value = Math.max(0, steps.length - 1);
}

function options(select, entries) {
  select.replaceChildren(...entries.map(([value, name]) => element("option", { value }, name)));
}

function watchedSteps() {
  return unique((here().health?.modules ?? []).flatMap((module) => module.steps)).sort((a, b) => a - b);
}

function showHealth() {
  if (!here().health?.modules.length) return;
  const step = watchedSteps()[find("#step").value];
  const format = find("#format").value;
  find("#step-shown").textContent = number(step);
  find("#step").setAttribute("aria-valuetext", `step ${step}`);
  const words = find("#modules-shown").value.toLowerCase();
  const rows = here().health.modules.filter((module) => module.kind === find("#kind").value && module.steps.includes(step)
    && module.name.toLowerCase().includes(words)).map((module) => atStep(module, module.steps.indexOf(step), format));
  const shown = drawExponents(chartAt("exponents"), rows, format);
  find(".heat-note").textContent = `Lines: what ${format} can hold; left of the dotted one numbers become zero, between it and the `
    + "next they lose digits, right of the last they overflow. The brighter, the more numbers." + (shown < rows.length
    ? ` ${shown} of ${rows.length} modules are drawn, those that ${format} would lose most of: narrow the names down.` : "");
  if (health) health.show(rows);
  else health = healthTable(rows);
}

function atStep(module, place, format) {
  const elements = module.elements[place] || 1;
  const hasFinite = module.overflow[place] + module.nan[place] < elements; // else there is no largest number
  const part = (key) => module[key][place] / elements;
  return { name: module.name, counts: module.histogram.counts[place], low: module.histogram.low,
    maximum: hasFinite ? module.maximum[place] : null, rms: hasFinite ? module.rms[place] : null, underflow: module.underflow_known?.[place] === false || module.underflow_zeros[place] === null ? null : part("underflow_zeros"), subnormal: part("subnormal"),
    overflow: part("overflow"), nan: part("nan"), zeros: part("zeros"), what: module.what_if[format] };
}

function healthTable(rows) {
  const what = (title, pick, show) => ({ title, number: true, wide: true, value: (row) => row.what && pick(row.what),
    show: (row) => show(row.what ? pick(row.what) : null) });
  return new Table(tableAt("health"), {
    caption: "What was watched at this step; the last four columns are of all watched steps: "
      + "what the format that is chosen would make of these numbers", rows, sort: null,
    columns: [text("Module", "name", { name: true }), amount("Largest finite", "maximum", scientific, { wide: true }), amount("RMS", "rms", scientific, { wide: true }),
      amount("Underflow", "underflow", share), amount("Subnormal", "subnormal", share, { wide: true }), amount("Overflow", "overflow", share), amount("Zeros", "zeros", share, { wide: true }),
      amount("NaN", "nan", share, { wide: true }), what("In format: underflow", (each) => each.underflow, share),
      what("In format: overflow", (each) => each.overflow, share), what("Best scale", (each) => each.best_scale, power),
      what("Underflow with it", (each) => each.with_best?.underflow, share)],
  });
}

find("#rank")?.addEventListener("change", (event) => { chosen = Number(event.target.value); show(); });
for (const id of ["kind", "format", "step", "modules-shown"]) find(`#${id}`).addEventListener("input", showHealth);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts);
narrowly.addEventListener("change", charts); // a phone that is turned: names and colour bar as for the new width
if (documents.length > 1) ranksTable();
show();
document.documentElement.dataset.ready = "true";
