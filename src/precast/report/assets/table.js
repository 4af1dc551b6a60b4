// A table of any length: one page of rows is in the document at a time. Text is only ever set as text.

const PAGE = 25;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

function classes(column) {
  return ["number", "wide", "name", "word"].filter((name) => column[name]).join(" ") || null;
}

// columns: {title, value(row), show(row) -> text or node; number, wide (not on phones), name (long), word (never broken)}; detail(row) -> [[name, text]] or null
class Table {
  // empty: what is said in its place where there is no row
  constructor(host, { caption, columns, rows, sort = null, descending = true, detail = null, search = null, empty = null }) {
    if (empty !== null && !rows.length) {
      host.replaceChildren(element("p", { class: "soft" }, empty));
      return;
    }
    Object.assign(this, { host, caption, columns, rows, sort, descending, detail, search });
    this.page = 0;
    this.words = "";
    this.texts = new Map();
    this.build();
    this.update();
  }

  build() {
    this.count = element("span", { role: "status" });
    this.input = element("input", { type: "search", placeholder: "all words must match" });
    this.input.addEventListener("input", () => {
      this.words = this.input.value;
      this.page = 0;
      this.update();
    });
    const tools = element("div", { class: "tools" }, element("label", {}, "Search ", this.input), this.count);
    tools.hidden = !this.search || this.rows.length < 6;
    this.heads = this.columns.map((column, place) => {
      const button = element("button", { type: "button" }, column.title);
      button.addEventListener("click", () => this.sortBy(place));
      return element("th", { scope: "col", class: classes(column) }, button);
    });
    this.body = element("tbody");
    const table = element("table", {}, element("caption", {}, this.caption),
      element("thead", {}, element("tr", {}, ...this.heads)), this.body);
    this.back = element("button", { type: "button" }, "Previous");
    this.next = element("button", { type: "button" }, "Next");
    this.back.addEventListener("click", () => this.turn(-1));
    this.next.addEventListener("click", () => this.turn(1));
    this.place = element("span");
    this.pages = element("nav", { class: "pages tools", "aria-label": `Pages of: ${this.caption}` }, this.back,
      this.place, this.next);
    const scroll = element("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": this.caption }, table);
    this.host.replaceChildren(tools, scroll, this.pages);
  }

  show(rows) {
    this.rows = rows;
    this.texts = new Map();
    this.update();
  }

  sortBy(place) {
    const number = this.columns[place].number;
    this.descending = this.sort === place ? !this.descending : Boolean(number);
    this.sort = place;
    this.page = 0;
    this.update();
  }

  turn(by) {
    this.page += by;
    this.update();
  }

  text(row) {
    if (!this.texts.has(row)) this.texts.set(row, this.search(row).join(" ").toLowerCase());
    return this.texts.get(row);
  }

  found() {
    const words = this.words.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = words.length ? this.rows.filter((row) => words.every((word) => this.text(row).includes(word)))
      : this.rows.slice();
    if (this.sort === null) return rows;
    const value = this.columns[this.sort].value;
    const way = this.descending ? -1 : 1;
    return rows.map((row) => [value(row), row]).sort(([a], [b]) => {
      if (a == null || b == null) return (a == null) - (b == null); // what is not known comes last
      return a < b ? -way : a > b ? way : 0;
    }).map(([, row]) => row);
  }

  update() {
    const rows = this.found();
    const last = Math.max(0, Math.ceil(rows.length / PAGE) - 1);
    this.page = Math.min(this.page, last);
    const begin = this.page * PAGE;
    const shown = rows.slice(begin, begin + PAGE);
    this.body.replaceChildren(...(shown.length ? shown.map((row) => this.line(row)) : [this.nothing()]));
    this.heads.forEach((head, place) => head.setAttribute("aria-sort",
      place !== this.sort ? "none" : this.descending ? "descending" : "ascending"));
    this.count.textContent = `${number(rows.length)} of ${number(this.rows.length)}`;
    this.place.textContent = `${number(begin + 1)} to ${number(begin + shown.length)} of ${number(rows.length)}`;
    this.pages.hidden = last === 0;
    this.back.disabled = this.page === 0;
    this.next.disabled = this.page === last;
  }

  nothing() {
    return element("tr", {}, element("td", { class: "soft", colspan: this.columns.length }, "Nothing fits."));
  }

  line(row) {
    const cells = this.columns.map((column) => {
      return element("td", { class: classes(column) }, column.show(row));
    });
    const line = element("tr", {}, ...cells);
    const detail = this.detail && this.detail(row);
    if (detail) {
      const open = element("button", { type: "button", "aria-expanded": "false" }, ...cells[0].childNodes);
      open.addEventListener("click", () => this.toggle(open, line, detail));
      cells[0].replaceChildren(open);
    }
    return line;
  }

  toggle(open, line, detail) {
    const shown = open.getAttribute("aria-expanded") === "true";
    open.setAttribute("aria-expanded", String(!shown));
    if (shown) {
      line.nextSibling.remove();
      return;
    }
    const terms = detail.filter(([, text]) => text !== null && text !== "").flatMap(([name, text]) => [
      element("dt", {}, name), element("dd", {}, text)]);
    line.after(element("tr", { class: "detail" }, element("td", { colspan: this.columns.length },
      element("dl", {}, ...terms))));
  }
}
