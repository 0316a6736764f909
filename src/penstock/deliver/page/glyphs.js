// Texts without characters for which this machine has no glyph: a browser shows an empty box for each of them.

// No font has a glyph for this noncharacter: what is drawn for it is the box. (Firefox draws the number of the character
// into the box. It is not recognized there.)
const NO_CHARACTER = "\u{10ffff}";
const FAMILIAR = /^[\x20-\x7e\u00a0-\u017f\u2010-\u2026\u202f]*$/;
const SIZE = 24;
const context = new OffscreenCanvas(SIZE, SIZE).getContext("2d", { willReadFrequently: true });
const segmenter = new Intl.Segmenter();
const glyphs = new Map();
let box = null;

function picture(character) {
  context.clearRect(0, 0, SIZE, SIZE);
  context.fillText(character, 2, SIZE - 6);
  return context.getImageData(0, 0, SIZE, SIZE).data.join();
}

function hasGlyph(character) {
  if (box === null) {
    context.font = `${SIZE - 10}px ${getComputedStyle(document.body).fontFamily}`;
    box = picture(NO_CHARACTER);
  }
  if (!glyphs.has(character)) glyphs.set(character, picture(character) !== box);
  return glyphs.get(character);
}

// The text without such characters; of a text that has no others, their numbers.
export function readable(text) {
  if (FAMILIAR.test(text)) return text;
  const kept = [...segmenter.segment(text)].map(({ segment }) => segment).filter((cluster) => [...cluster].every(hasGlyph)).join("");
  if (kept === text) return text;
  return kept.replaceAll(/\s+/g, " ").trim() || [...text].map((one) => `U+${one.codePointAt(0).toString(16).toUpperCase()}`).join(" ");
}

// Charts write on a canvas. Only what is drawn changes: their data keep the whole text.
export function drawReadably() {
  for (const method of ["fillText", "measureText"]) {
    const native = CanvasRenderingContext2D.prototype[method];
    CanvasRenderingContext2D.prototype[method] = function (text, ...place) {
      return native.call(this, readable(String(text)), ...place);
    };
  }
}
