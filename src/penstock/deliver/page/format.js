// Formats numbers.

const THIN = "\u202f";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const spaced = (text) => text.replaceAll(",", THIN);

export const known = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  return known(value) ? spaced(whole.format(value)) : "–";
}

export function rate(value) {
  if (!known(value)) return "–";
  return spaced((value < 100 ? tenth : whole).format(value));
}

// A duration as [number, unit], so that the unit can be set smaller.
export function duration(ms) {
  if (!known(ms)) return ["–", ""];
  if (ms < 9.95) return [tenth.format(ms), "ms"];
  if (ms < 9_995) return [count(ms), "ms"];
  if (ms < 600_000) return [tenth.format(ms / 1_000), "s"];
  return [count(ms / 60_000), "min"];
}

// A size in bytes.
export function size(bytes) {
  if (!known(bytes)) return "–";
  const [unit, name] = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([least]) => bytes >= least) ?? [1, "B"];
  return `${unit === 1 ? count(bytes) : rate(bytes / unit)}${THIN}${name}`;
}

// An age, in its largest fitting unit.
export function lapse(ms) {
  if (!known(ms)) return "–";
  const [size, unit] = [[86_400_000, "d"], [3_600_000, "h"], [60_000, "min"], [1_000, "s"]].find(([least]) => ms >= 2 * least) ?? [1_000, "s"];
  return `${count(Math.floor(Math.max(0, ms) / size))}${THIN}${unit}`;
}

export const durationText = (ms) => duration(ms).filter(Boolean).join(THIN);
