// The card that explains what the pointer or the focus is on.

import { element } from "./elements.js";

export class Tip {
  constructor(card) {
    this.card = card;
    addEventListener("keydown", ({ key }) => key === "Escape" && this.hush());
  }

  // `tell` gives { title, notes, facts: [[name, value], …] }; it is asked again whenever the numbers change.
  explains(target, tell) {
    for (const event of ["pointerenter", "focus"]) target.addEventListener(event, () => this.show(target, tell));
    for (const event of ["pointerleave", "blur"]) target.addEventListener(event, () => this.hush());
  }

  refresh() {
    if (!this.target) return;
    if (this.target.isConnected) this.show(this.target, this.tell);
    else this.hush();
  }

  show(target, tell) {
    this.target = target;
    this.tell = tell;
    const { title, notes = [], facts = [] } = tell();
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

  hush() {
    this.target = null;
    this.card.hidden = true;
  }
}
