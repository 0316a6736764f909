// The tooltip for the element under the pointer or the focus.

import { element } from "./elements.js";

export class Tip {
  constructor(card) {
    this.card = card;
    addEventListener("keydown", ({ key }) => key === "Escape" && this.hide());
  }

  // `describe` returns { title, notes, facts: [[name, value], …] }; it is called again when the numbers change.
  attach(target, describe) {
    for (const event of ["pointerenter", "focus"]) target.addEventListener(event, () => this.show(target, describe));
    for (const event of ["pointerleave", "blur"]) target.addEventListener(event, () => this.hide());
  }

  refresh() {
    if (!this.target) return;
    if (this.target.isConnected) this.show(this.target, this.describe);
    else this.hide();
  }

  show(target, describe) {
    this.target = target;
    this.describe = describe;
    const { title, notes = [], facts = [] } = describe();
    const list = element("dl");
    for (const [name, value] of facts) list.append(element("dt", "", name), element("dd", "", value));
    this.card.replaceChildren(element("strong", "", title), ...notes.filter(Boolean).map((note) => element("p", "", note)), list);
    this.card.hidden = false;
    const box = target.getBoundingClientRect();
    const own = this.card.getBoundingClientRect();
    const below = box.bottom + 8 + own.height < innerHeight;
    this.card.style.left = `${Math.max(12, Math.min(innerWidth - own.width - 12, box.left))}px`;
    this.card.style.top = `${below ? box.bottom + 8 : Math.max(12, box.top - own.height - 8)}px`;
  }

  hide() {
    this.target = null;
    this.card.hidden = true;
  }
}
