// The page of a search: the chart of what was tried, the tree of modules, the losses, and the table of errors.

const data = JSON.parse(document.getElementById("data").textContent);
const find = (selector) => document.querySelector(selector);
const SETUPS = ["#3b82c4", "#e69f00", "#12a37f", "#cc79a7", "#8c6bb1", "#d55e00", "#8b949e"];
const LEGEND = { orientation: "h", y: 1.14, traceorder: "normal" };
const named = data.curves.map((curve) => curve.name);

function paint(name) {
  return SETUPS[named.indexOf(name) % SETUPS.length];
}

function percent(part) {
  if (part == null) return "overflows";
  return part && part < 1e-4 ? "under 0.01%" : `${+(100 * part).toPrecision(2)}%`;
}

function drawTried(host) {
  const isMemory = data.objective === "memory";
  const unit = isMemory ? 2 ** 20 : 1e-3;
  const bars = (ends, scale) => ({ type: "data", symmetric: false, array: [(ends[2] - ends[1]) / scale],
    arrayminus: [(ends[1] - ends[0]) / scale], thickness: 1.5, width: 4 });
  const traces = data.points.map((point) => ({
    type: "scatter", mode: "markers", name: plain(point.name), x: [point.cost[1] / unit], y: [100 * point.loss[1]],
    marker: { color: paint(point.name), size: point.is_answer ? 15 : 10, symbol: point.is_answer ? "star" : "circle" },
    error_x: { ...bars(point.cost, unit), color: paint(point.name), visible: !isMemory },
    error_y: { ...bars(point.loss, 0.01), color: paint(point.name) },
  }));
  const line = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 100 * data.tolerance, y1: 100 * data.tolerance };
  draw(host, traces, {
    height: 380, margin: { l: 60, r: 15, t: 25, b: 50 }, showlegend: true, legend: LEGEND,
    xaxis: axis({ title: { text: isMemory ? `${data.words.memory} (MiB)` : `time of a ${data.words.run} (ms)` }, rangemode: "tozero" }),
    yaxis: axis({ title: { text: `${data.words.value} against float32` }, ticksuffix: "%" }),
    shapes: [{ ...line, line: { color: css("bad"), width: 1, dash: "dash" } }],
    annotations: [{ xref: "paper", x: 0, xanchor: "left", y: line.y0, yanchor: "bottom", showarrow: false, text: "tolerance", font: { color: css("bad") } }],
  });
}

function drawLosses(host) {
  const traces = data.curves.map((curve) => ({ type: "scatter", mode: "lines", name: plain(curve.name), x0: 1, y: curve.mean,
    line: { color: paint(curve.name), width: 2 } }));
  draw(host, traces, { height: 360, showlegend: true, legend: LEGEND, xaxis: axis({ title: { text: data.words.place } }),
    yaxis: axis({ title: { text: data.words.value } }) });
}

function errors() {
  const column = (title, key) => ({ title, number: true, value: (row) => row[key] ?? Infinity,
    show: (row) => percent(row[key] === null ? null : Math.sqrt(row[key])) });
  new Table(find("[data-table=sites]"), {
    caption: `What 16 bits do to the ${data.words.value} and to ${data.words.changed}, each operation of each module; where a group was measured, its share`,
    rows: data.sites, sort: 3, empty: "Nothing was measured.",
    columns: [
      { title: "Module", name: true, value: (row) => row.module ?? "", show: (row) => row.module || (row.module === null ? "-" : "the model") },
      { title: "Operation", value: (row) => row.op, show: (row) => row.op },
      { title: "Dtype", wide: true, value: (row) => row.dtype, show: (row) => chip(row.dtype) },
      column(`Error of ${data.words.changed}`, "gradient"), column(`Error of the ${data.words.value}`, "loss"),
      { title: "Excluded", wide: true, value: (row) => row.barred, show: (row) => row.barred || "-" },
    ],
    search: (row) => [row.module ?? "", row.op, row.barred, row.dtype],
    detail: (row) => [["Gradient that changes most", row.parameter || null], ["Of it becomes zero", row.flushed ? share(row.flushed) : null],
      ["Why it may not run in 16 bits", row.barred || null], ["Measured", row.alone ? "alone" : "in a group"]],
  });
}

function charts() {
  if (data.points.length) drawTried(find("[data-chart=tried]"));
  if (data.curves.length) drawLosses(find("[data-chart=losses]"));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts);
narrowly.addEventListener("change", charts);
if (data.nodes.length) {
  drawTree(find(".tree"), data.nodes, [["Error", (node) => (node.gradient === null ? "-" : percent(node.gradient)), (node) => node.barred.join("; ")]]);
  drawLegend(find(".legend"), data.nodes);
}
errors();
charts();
document.documentElement.dataset.ready = "true";
