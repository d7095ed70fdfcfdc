// Reads JSON. What is malformed or missing reads as null, so that a program
// asks for what it expects and checks what it got.

export class Json {
  private fields: Map<string, Json> = new Map<string, Json>();
  items: Json[] = [];
  text: string = "";
  number: f64 = NaN;
  isNull: bool = true;

  static parse(text: string): Json {
    return new Reader(text).value();
  }

  // The member of an object; null if there is none.
  get(name: string): Json {
    return this.fields.has(name) ? this.fields.get(name) : new Json();
  }

  set(name: string, value: Json): void {
    this.fields.set(name, value);
  }

  get integer(): i32 {
    return isFinite(this.number) ? <i32>this.number : 0;
  }
}

// A text as a JSON string.
export function quote(text: string): string {
  let out = '"';
  for (let i = 0; i < text.length; i++) {
    const code = text.charCodeAt(i);
    if (code == 0x22 || code == 0x5c) out += "\\" + text.charAt(i);
    else if (code < 0x20) out += "\\u" + code.toString(16).padStart(4, "0");
    else out += text.charAt(i);
  }
  return out + '"';
}

class Reader {
  private at: i32 = 0;

  constructor(private text: string) {}

  value(): Json {
    const value = new Json();
    const first = this.peek();
    if (first == 0x22) {
      value.isNull = false;
      value.text = this.string();
    } else if (first == 0x7b) {
      value.isNull = false;
      this.at++;
      while (this.peek() == 0x22) {
        const name = this.string();
        if (!this.take(0x3a)) break;
        value.set(name, this.value());
        if (!this.take(0x2c)) break;
      }
      this.take(0x7d);
    } else if (first == 0x5b) {
      value.isNull = false;
      this.at++;
      while (this.peek() != 0x5d && this.at < this.text.length) {
        value.items.push(this.value());
        if (!this.take(0x2c)) break;
      }
      this.take(0x5d);
    } else {
      const start = this.at;
      while (this.at < this.text.length && !ends(this.text.charCodeAt(this.at))) this.at++;
      const word = this.text.substring(start, this.at);
      value.isNull = word == "null" || word == "";
      value.text = word;
      value.number = parseFloat(word);
    }
    return value;
  }

  private string(): string {
    let out = "";
    this.at++;
    while (this.at < this.text.length) {
      const code = this.text.charCodeAt(this.at++);
      if (code == 0x22) break;
      if (code != 0x5c) {
        out += String.fromCharCode(code);
        continue;
      }
      const escaped = this.text.charAt(this.at++);
      if (escaped == "u") {
        out += String.fromCharCode(<i32>parseInt(this.text.substr(this.at, 4), 16));
        this.at += 4;
      } else if (escaped == "n") out += "\n";
      else if (escaped == "t") out += "\t";
      else if (escaped == "r") out += "\r";
      else if (escaped == "b") out += "\b";
      else if (escaped == "f") out += "\f";
      else out += escaped;
    }
    return out;
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
