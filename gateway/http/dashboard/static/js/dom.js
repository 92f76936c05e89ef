// Building and updating elements. All text goes in as text: nothing here, or elsewhere, parses HTML.

export const byId = (id) => document.getElementById(id);

/** element("p", {class: "small", hidden: true}, "text", child): attributes; true and false toggle. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(node, name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Touch the document only where something changed: layout and screen readers stay at rest. */
export function setAttribute(node, name, value) {
  if (value === false || value === null) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else {
    const text = value === true ? "" : String(value);
    if (node.getAttribute(name) !== text) node.setAttribute(name, text);
  }
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** [number, unit] into a node, the unit in smaller type. */
export function setQuantity(node, [number, unit]) {
  if (node.dataset.number === number && node.dataset.unit === unit) return;
  node.dataset.number = number;
  node.dataset.unit = unit;
  node.replaceChildren(number);
  if (unit) node.append(" ", element("span", { class: "unit" }, unit));
}

/** Custom properties may be set under the page's policy; style attributes may not. */
export function setStyle(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

/** Give `parent` one child a key, in this order, reusing those that are there. */
export function keyed(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let node = old.get(key);
    if (node === undefined) {
      node = make(item);
      node.dataset.key = key;
    }
    old.delete(key);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
    update(node, item);
  }
  for (const node of old.values()) node.remove();
}
