// Quantities in words, and the colours of dtypes.

const COLOURS = {
  float32: "#3b82c4", bfloat16: "#12a37f", float16: "#e69f00", float8_e4m3fn: "#cc79a7", float8_e5m2: "#d55e00",
  float64: "#8c6bb1", other: "#8b949e",
};

function colour(dtype) {
  return COLOURS[dtype] ?? COLOURS.other;
}

function number(value) {
  return value == null ? "-" : value.toLocaleString("en-US");
}

function scientific(value) {
  if (value == null) return "-";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return number(value);
  if (value === 0 || (Math.abs(value) >= 0.001 && Math.abs(value) < 100000)) return String(+value.toPrecision(4));
  return value.toExponential(2);
}

function duration(seconds) {
  if (seconds == null) return "-";
  if (seconds >= 100) return `${number(Math.round(seconds))} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 0.001) return `${(seconds * 1e3).toFixed(1)} ms`;
  return seconds ? `${(seconds * 1e6).toFixed(1)} µs` : "0";
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  for (; bytes >= 1024 && place < units.length - 1; place += 1) bytes /= 1024;
  return `${place ? bytes.toFixed(1) : bytes} ${units[place]}`;
}

function share(part) {
  if (part == null) return "-";
  if (part > 0 && part < 0.001) return "under 0.1%";
  if (part > 0.999 && part < 1) return "over 99.9%";
  return `${(part * 100).toFixed((part < 0.1 && part > 0) || (part > 0.99 && part < 1) ? 1 : 0)}%`;
}

function power(value) {
  return value == null ? "-" : `2^${Math.round(Math.log2(value))}`;
}

function chip(dtype) {
  const made = element("span", { class: "dtype" }, dtype);
  made.style.setProperty("--c", colour(dtype));
  return made;
}

function chips(dtypes) {
  const made = element("span");
  dtypes.forEach((dtype, place) => made.append(place ? " " : "", chip(dtype)));
  return made;
}

function marked(text) { // what stands between backticks as code
  const made = element("span");
  text.split(/`([^`]+)`/).forEach((part, place) => made.append(place % 2 ? element("code", {}, part) : part));
  return made;
}

function few(names) {
  return names.slice(0, 3).join(", ") + (names.length > 3 ? ` and ${number(names.length - 3)} more` : "");
}
