const clear = "rgba(0,0,0,0)";
for (const [id, [curves, layout]] of JSON.parse(document.getElementById("data").textContent)) {
  const all = {margin: {t: 10}, paper_bgcolor: clear, plot_bgcolor: clear, ...layout};
  Plotly.newPlot(id, curves, all, {displayModeBar: false, responsive: true});
}
document.documentElement.dataset.ready = "true";
