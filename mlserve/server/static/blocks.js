/** What /v1/cache/blocks says, block by block. No DOM here. */

/**
 * One object per run of equal blocks, repeated for each of its blocks:
 * `{state, references, owner, image}`. `owner` is the adapter (its name, or its digest if nothing has that content by
 * name now), null for the base model; `image` is a digest, null for text.
 */
export function expand(map) {
  const cells = [];
  const owners = map.adapters.map(({ digest, name }) => name ?? digest);
  for (const [count, state, references, adapter, image] of map.runs) {
    const cell = {
      state,
      references,
      owner: adapter === null ? null : owners[adapter],
      image: image === null ? null : map.images[image],
    };
    for (let i = 0; i < count; i++) cells.push(cell);
  }
  return cells;
}

/** Places of blocks that came into use, or that one more sequence uses. */
export function cameIntoUse(before, after) {
  const places = [];
  for (let i = 0; i < after.length && i < before.length; i++) {
    if (after[i].references > before[i].references) places.push(i);
  }
  return places;
}

/** How many blocks are in each state, hold text of each owner, and hold images. */
export function count(cells) {
  const states = { free: 0, cached: 0, in_use: 0 };
  const owners = new Map();
  let images = 0;
  for (const { state, owner, image } of cells) {
    states[state] += 1;
    if (state === "free") continue;
    if (image === null) owners.set(owner, (owners.get(owner) ?? 0) + 1);
    else images += 1;
  }
  return { states, owners, images };
}

/** A block in words. */
export function describe(cell) {
  if (cell.state === "free") return "free";
  const users = cell.references === 1 ? "1 sequence" : `${cell.references} sequences`;
  const state = cell.state === "cached" ? "cached" : `in use by ${users}`;
  const content = cell.image === null ? "text" : `image ${cell.image}`;
  return `${state}, ${content}, ${cell.owner === null ? "base model" : `adapter ${cell.owner}`}`;
}
