// Elements that stay while their content changes, so that focus and selection survive an update. External texts are only
// inserted as text.

import { readable } from "./glyphs.js";

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) write(made, text);
  return made;
}

export function draw(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(made, attributes);
  if (text) write(made, text);
  return made;
}

export function set(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (made.getAttribute(name) !== String(value)) made.setAttribute(name, value);
  }
}

// A table row that begins with a name and a second line.
export function namedRow() {
  const row = element("tr");
  const name = element("th", "stage-name");
  name.scope = "row";
  name.append(element("span"), element("small"));
  row.append(name);
  return row;
}

// Written only if it changes, because screen readers read every update. A text that is not shown as it is becomes the title.
export function write(made, text, most = Infinity) {
  const shown = short(readable(text), most);
  if (made.textContent !== shown) made.textContent = shown;
  const title = shown === text ? "" : text;
  if (made.title !== title) made.title = title;
}

// One child per item, in order; existing children are reused.
export function keep(parent, items, { key, make, show }) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, at) => {
    const name = key(item);
    const child = before.get(name) ?? make(item);
    before.delete(name);
    child.dataset.key = name;
    show(child, item);
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
  });
  while (parent.children.length > items.length) parent.lastElementChild.remove();
}

const short = (text, most) => (text.length > most ? `${text.slice(0, Math.max(1, most - 1))}…` : text);
