// The charts, drawn by Plotly. It reads text as a little HTML, so names are escaped before it gets them.

// Binary exponents: smallest subnormal, smallest normal, largest. A count at e is of magnitudes above 2**e and up to
// 2**(e + 1), and half of the smallest subnormal is what still rounds up to it: so zero begins below one less.
const FORMATS = {
  float16: [-24, -14, 15], bfloat16: [-133, -126, 127], float8_e4m3fn: [-9, -6, 8], float8_e5m2: [-16, -14, 15],
};
const MOST = 60; // modules in the heat map at once

function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function css(name) {
  const probe = document.body.appendChild(element("i"));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const narrowly = matchMedia("(max-width: 699px)");

function narrow() {
  return narrowly.matches;
}

function short(name) {
  const most = narrow() ? 16 : 36;
  return name.length > most ? `\u2026${name.slice(1 - most)}` : name;
}

function axis(more) {
  return { gridcolor: css("line"), zerolinecolor: css("line"), linecolor: css("line"), automargin: true, ...more };
}

function draw(host, traces, layout) {
  host.style.height = `${layout.height}px`; // so that what is below stays below while Plotly draws anew
  const touch = matchMedia("(pointer: coarse)").matches; // where a drag is how one scrolls
  Plotly.react(host, traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("ink"), size: 12 },
    margin: { l: 50, r: 15, t: 25, b: 40 }, showlegend: false, dragmode: touch ? false : "zoom",
    hoverlabel: { bgcolor: css("card"), bordercolor: css("line"), font: { color: css("ink") } }, ...layout,
  }, { displayModeBar: false, responsive: true });
}

function drawSteps(host, steps) {
  const panels = [["loss", "Loss", "#3b82c4", "linear"], ["scale", "Scale", "#e69f00", "log"]].filter(
    ([key]) => steps.some((step) => step[key] !== null));
  host.hidden = !panels.length;
  if (!panels.length) return;
  const skipped = steps.filter((step) => step.skipped);
  const [first, last] = [steps[0].step, steps[steps.length - 1].step];
  const layout = { height: 90 + 190 * panels.length, xaxis: axis({ title: { text: "Step" }, tickformat: ",d",
    anchor: panels.length > 1 ? "y2" : "y", ...(last - first < 10 ? { dtick: 1, range: [first - 0.5, last + 0.5] } : {}) }) };
  const traces = panels.flatMap(([key, title, line, type], place) => {
    const y = place ? "y2" : "y";
    const domain = panels.length === 1 ? [0, 1] : place ? [0, 0.42] : [0.54, 1];
    layout[place ? "yaxis2" : "yaxis"] = axis({ title: { text: title }, type, domain });
    return [
      { type: "scatter", mode: steps.length < 60 ? "lines+markers" : "lines", name: title, yaxis: y, x: steps.map((step) => step.step),
        y: steps.map((step) => step[key]), line: { color: line, width: 2, shape: place ? "hv" : "linear" }, marker: { color: line, size: 5 },
        hovertemplate: `step %{x}: ${title.toLowerCase()} %{y}<extra></extra>` },
      { type: "scatter", mode: "markers", name: "skipped", yaxis: y, x: skipped.map((step) => step.step),
        y: skipped.map((step) => lastKnown(steps, step, key)), marker: { symbol: "x", size: 9, color: css("bad") },
        hovertemplate: "step %{x} was skipped<extra></extra>" },
    ];
  });
  draw(host, traces, layout);
}

function lastKnown(steps, step, key) {
  const before = steps.filter((each) => each.step <= step.step && each[key] !== null);
  const after = steps.find((each) => each[key] !== null);
  return (before.length ? before[before.length - 1] : after)[key];
}

// watched: {name, counts, low} of one kind at one step
function drawExponents(host, watched, format) {
  host.hidden = !watched.length;
  if (!watched.length) return 0;
  const shown = worstFirst(watched, format).slice(0, MOST).sort((a, b) => a.place - b.place);
  const [low, high] = exponents(shown, format);
  const x = Array.from({ length: high - low + 1 }, (_, k) => low + k);
  const part = shown.map(({ counts, low: begin }) => {
    const total = counts.reduce((a, b) => a + b, 0) || 1;
    return x.map((exponent) => (counts[exponent - begin] ?? 0) / total);
  });
  const limits = FORMATS[format].map((exponent, place) => exponent + [-1.5, -0.5, 0.5][place]); // between two columns
  const lines = limits.map((x, place) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1,
    line: { color: css("bad"), width: 1.5, dash: place ? "solid" : "dot" } }));
  const names = shown.map(({ name }) => plain(short(name)));
  const height = 15 * shown.length + 110;
  draw(host, [
    { type: "heatmap", x, y: shown.map((_, place) => place), z: part.map((row) => row.map((p) => (p ? Math.log10(p) : null))),
      zmin: -5, zmax: 0, colorscale: "Viridis", customdata: part.map((row, place) => row.map((p) => (
        `${plain(shown[place].name)}: ${share(p)}`))), hovertemplate: "2^%{x}, %{customdata}<extra></extra>", hoverongaps: false, showscale: !narrow(),
      colorbar: { title: { text: "share of numbers", side: "right" }, thickness: 12, tickvals: [-4, -2, 0],
        ticktext: ["0.01%", "1%", "100%"], outlinewidth: 0 } },
  ], { height, xaxis: axis({ title: { text: "Binary exponent" }, range: [low - 0.5, high + 0.5] }),
    yaxis: axis({ range: [shown.length - 0.5, -0.5], tickvals: shown.map((_, place) => place), ticktext: names,
      showgrid: false, zeroline: false, tickfont: { size: 10 } }),
    shapes: lines });
  return shown.length;
}

function worstFirst(watched, format) {
  const [least, , most] = FORMATS[format];
  const outside = ({ counts, low }) => counts.reduce((sum, count, k) => (
    sum + (low + k < least - 1 || low + k > most ? count : 0)), 0);
  return watched.map((each, place) => ({ ...each, place, lost: outside(each) })).sort((a, b) => b.lost - a.lost || a.place - b.place);
}

function exponents(shown, format) {
  let [low, , high] = format === "bfloat16" ? FORMATS.float16 : FORMATS[format];
  for (const { counts, low: begin } of shown) {
    const first = counts.findIndex(Boolean);
    if (first >= 0) {
      low = Math.min(low, begin + first);
      high = Math.max(high, begin + counts.findLastIndex(Boolean));
    }
  }
  return [low - 2, high + 2];
}
