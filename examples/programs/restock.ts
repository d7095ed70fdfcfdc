// Task: "Which bolts do we have fewer than 100 of, and what would it cost to
// order the missing ones? I want a table, and a CSV for the order."
//
// Input: {"query": "bolt", "needed": 100}

import * as forge from "./lib/forge";
import { quote } from "./lib/json";

// The two tools this program may call. The import list is the capability list.
@external("tool", "inventory.find_parts") declare function find_parts(request: usize, length: i32): i32;
@external("tool", "inventory.get_stock") declare function get_stock(request: usize, length: i32): i32;

function euros(cents: i64): string {
  return (cents / 100).toString() + "." + (cents % 100).toString().padStart(2, "0");
}

function row(part: string, name: string, stock: string, order: string, cost: string): void {
  forge.print(
    part.padEnd(8) + name.padEnd(22) + stock.padStart(9) + order.padStart(10) + cost.padStart(12));
}

export function forge_run(): i32 {
  const task = forge.input();
  const needed = task.get("needed").integer;

  const found = forge.call(find_parts, '{"query":' + quote(task.get("query").text) + "}");
  if (found.failed) return forge.fail("find_parts", found);

  let csv = "part_id,order,cost_eur\n";
  let total: i64 = 0;
  row("part", "name", "in stock", "to order", "cost EUR");
  const parts = found.body.get("parts").items;
  for (let i = 0; i < parts.length; i++) {
    const part = parts[i];
    const id = part.get("part_id").text;
    const stock = forge.call(get_stock, '{"part_id":' + quote(id) + "}");
    if (stock.failed) return forge.fail("get_stock " + id, stock);

    const available = stock.body.get("available").integer;
    const missing = max(needed - available, 0);
    const cost = missing * part.get("price_cents").integer;
    total += cost;
    row(id, part.get("name").text, available.toString(),
      missing > 0 ? missing.toString() : "-", missing > 0 ? euros(cost) : "-");
    if (missing > 0) csv += id + "," + missing.toString() + "," + euros(cost) + "\n";
  }
  row("total", "", "", "", euros(total));

  forge.artifact("restock.csv", "text/csv", csv);
  return 0;
}
