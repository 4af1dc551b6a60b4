// The module tree: details that are filled when they are first opened, so a large model costs nothing until then.

function bar(node) {
  const total = Object.values(node.dtypes).reduce((a, b) => a + b, 0);
  const parts = Object.entries(node.dtypes).sort(([, a], [, b]) => b - a);
  const words = parts.map(([dtype, seconds]) => `${dtype} ${share(total ? seconds / total : 0)}`).join(", ");
  const made = element("span", { class: "bar", role: "img", "aria-label": words || "no time", title: words });
  for (const [dtype, seconds] of parts) {
    const part = element("i");
    part.style.cssText = `width: ${total ? (100 * seconds) / total : 0}%`;
    part.style.setProperty("--c", colour(dtype));
    made.append(part);
  }
  return made;
}

// more: [title, text(node), title(node)] of further columns
function drawTree(host, nodes, more = []) {
  const children = nodes.map(() => []);
  nodes.forEach((node, place) => node.parent !== null && children[node.parent].push(place));

  function cells(place) {
    const node = nodes[place];
    const above = node.parent !== null && nodes[node.parent].name ? nodes[node.parent].name.length + 1 : 0;
    const name = element("span", { class: "name" }, element("code", {}, node.name.slice(above) || "the model"),
      node.type ? element("span", { class: "soft" }, ` ${node.type}`) : null);
    return [name, bar(node), element("span", { class: "number" }, duration(node.seconds)),
      element("span", { class: "number wide" }, number(node.casts)),
      element("span", { class: "number wide" }, duration(node.cast_seconds)),
      ...more.map(([, text, hint]) => element("span", { class: "number wide", title: hint(node) || null }, text(node)))];
  }

  function branch(place) {
    if (!children[place].length) return element("div", { class: "leaf" }, element("div", { class: "node" }, ...cells(place)));
    const made = element("details", { "data-place": place }, element("summary", { class: "node" }, ...cells(place)));
    made.addEventListener("toggle", () => fill(made));
    return made;
  }

  function fill(details) {
    if (details.open && details.childElementCount === 1) details.append(...children[details.dataset.place].map(branch));
  }

  function unfold(level, room) { // the first levels, as long as there is room for so many lines
    const below = level.reduce((sum, details) => sum + children[details.dataset.place].length, 0);
    if (below === 0 || below > room) return;
    for (const details of level) {
      details.open = true;
      fill(details);
    }
    unfold(level.flatMap((details) => [...details.querySelectorAll(":scope > details")]), room - below);
  }

  const titles = [["Module", ""], ["Dtypes by time", ""], ["Time", "number"], ["Casts", "number wide"],
    ["Time of casts", "number wide"], ...more.map(([title]) => [title, "number wide"])];
  const heads = element("div", { class: "node heads", "aria-hidden": "true" },
    ...titles.map(([title, classes]) => element("span", { class: classes || null }, title)));
  const roots = nodes.flatMap((node, place) => (node.parent === null ? [place] : [])).map(branch);
  host.replaceChildren(heads, ...roots);
  unfold(roots.filter((root) => root.matches("details")), 20);
}

function drawLegend(host, nodes) {
  const dtypes = [...new Set(nodes.flatMap((node) => Object.keys(node.dtypes)))];
  host.replaceChildren(...dtypes.map(chip));
}
