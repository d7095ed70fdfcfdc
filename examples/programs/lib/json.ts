// Reads what tools answer, which is JSON. What is missing, or of another type, reads as
// null, so that a program asks for what it expects and checks what it got.

export class Json {
  // Memory is never freed, and most values are neither: what has no members has no map.
  private fields: Map<string, Json> | null = null;
  items: Json[] = none;
  text: string = ""; // of a number as well, as it was written
  number: f64 = NaN; // to 17 digits; parseFloat is not right from 1e38 on
  isNull: bool = true;

  static parse(text: string): Json {
    return new Reader(text).value();
  }

  // The member of an object; null if there is none.
  get(name: string): Json {
    const fields = this.fields;
    return fields && fields.has(name) ? fields.get(name) : new Json();
  }

  set(name: string, value: Json): void {
    let fields = this.fields;
    if (!fields) this.fields = fields = new Map<string, Json>();
    fields.set(name, value);
  }

  // Exact up to 2^53, as everywhere in JSON that numbers are doubles; 0 if it is no number.
  get integer(): i64 {
    return isFinite(this.number) ? <i64>this.number : 0;
  }
}

const none: Json[] = [];

// A text as a JSON string.
export function quote(text: string): string {
  let length = 2;
  for (let i = 0; i < text.length; i++) length += quotedLength(text.charCodeAt(i));
  const out = new Text(length);
  out.add(0x22);
  for (let i = 0; i < text.length; i++) {
    const code = text.charCodeAt(i);
    if (code < 0x20) {
      out.add(0x5c);
      out.add(0x75);
      for (let shift = 12; shift >= 0; shift -= 4) out.add("0123456789abcdef".charCodeAt(code >> shift & 15));
    } else {
      if (code == 0x22 || code == 0x5c) out.add(0x5c);
      out.add(code);
    }
  }
  out.add(0x22);
  return out.whole;
}

function quotedLength(code: i32): i32 {
  return code < 0x20 ? 6 : code == 0x22 || code == 0x5c ? 2 : 1;
}

// A text that is put together in one piece of memory, since none is ever freed: adding to
// a string takes its length again each time.
class Text {
  private units: StaticArray<u16>;
  private length: i32 = 0;

  constructor(lengthMax: i32) {
    this.units = new StaticArray<u16>(lengthMax);
  }

  add(code: i32): void {
    this.units[this.length++] = <u16>code;
  }

  get whole(): string {
    return String.UTF16.decodeUnsafe(changetype<usize>(this.units), <usize>this.length << 1);
  }
}

class Reader {
  private at: i32 = 0;

  constructor(private text: string) {}

  value(): Json {
    const value = new Json();
    const first = this.peek();
    let isWhole = true;
    if (first == 0x22) {
      value.text = this.string();
      isWhole = this.text.charCodeAt(this.at - 1) == 0x22;
    } else if (first == 0x7b) {
      this.at++;
      while (this.peek() == 0x22) {
        const name = this.string();
        if (!this.take(0x3a)) break;
        value.set(name, this.value());
        if (!this.take(0x2c)) break;
      }
      isWhole = this.take(0x7d);
    } else if (first == 0x5b) {
      this.at++;
      value.items = [];
      while (this.peek() != 0x5d && this.at < this.text.length) {
        value.items.push(this.value());
        if (!this.take(0x2c)) break;
      }
      isWhole = this.take(0x5d);
    } else {
      const start = this.at;
      while (this.at < this.text.length && !ends(this.text.charCodeAt(this.at))) this.at++;
      value.text = this.text.substring(start, this.at);
      value.number = parseFloat(value.text);
      isWhole = isFinite(value.number) || value.text == "true" || value.text == "false";
    }
    value.isNull = false;
    return isWhole ? value : new Json();
  }

  private string(): string {
    const start = ++this.at;
    let end = start;
    let isPlain = true;
    while (end < this.text.length && this.text.charCodeAt(end) != 0x22) {
      if (this.text.charCodeAt(end) == 0x5c) {
        isPlain = false;
        end++;
      }
      end++;
    }
    if (isPlain) {
      this.at = end + 1;
      return this.text.substring(start, end);
    }
    const out = new Text(end - start);
    while (this.at < end) {
      const code = this.text.charCodeAt(this.at++);
      out.add(code == 0x5c ? this.escaped() : code);
    }
    this.at = end + 1;
    return out.whole;
  }

  // What an escape stands for, from behind its backslash on.
  private escaped(): i32 {
    const code = this.text.charCodeAt(this.at++);
    if (code == 0x75) {
      this.at += 4;
      return <i32>parseInt(this.text.substring(this.at - 4, this.at), 16);
    }
    const at = "bfnrt".indexOf(String.fromCharCode(code));
    return at < 0 ? code : "\b\f\n\r\t".charCodeAt(at);
  }

  private peek(): i32 {
    while (this.at < this.text.length && this.text.charCodeAt(this.at) <= 0x20) this.at++;
    return this.at < this.text.length ? this.text.charCodeAt(this.at) : -1;
  }

  private take(code: i32): bool {
    if (this.peek() != code) return false;
    this.at++;
    return true;
  }
}

function ends(code: i32): bool {
  return code <= 0x20 || code == 0x2c || code == 0x5d || code == 0x7d;
}
