//! Which function an error is in that says where in a module it is.
//!
//! wasmparser tells a place by its offset, which who writes WebAssembly as text does not
//! have. The function's index and, where the module has names for debuggers, its name
//! are what they look for.

use alloc::string::String;
use core::fmt::Display;

use wasmparser::{BinaryReaderError, KnownCustom, Name, Parser, Payload, TypeRef};

/// What stands before an offset.
const AT: &str = "(at offset 0x";
/// The longest name that is told, in bytes.
const NAME_BYTES_MAX: usize = 128;

/// The same text, and behind it the function of this module that its offset is in.
pub(crate) fn told(text: String, module: &[u8]) -> String {
    let offset = text
        .rsplit_once(AT)
        .and_then(|(_, rest)| usize::from_str_radix(rest.split(')').next()?, 16).ok());
    let function = offset.and_then(|offset| function_at(module, offset).ok().flatten());
    match function.map(|index| (index, name_of(module, index).ok().flatten())) {
        Some((index, Some(name))) => alloc::format!("{text} in function {index}, ${name}"),
        Some((index, None)) => alloc::format!("{text} in function {index}"),
        None => text,
    }
}

/// The same of what is told of this function already, by its index.
pub(crate) fn named(said: impl Display, function: u32, module: &[u8]) -> String {
    match name_of(module, function) {
        Ok(Some(name)) => alloc::format!("{said}, ${name}"),
        _ => alloc::format!("{said}"),
    }
}

/// The index of the function whose body is there; those that are imported come first.
fn function_at(module: &[u8], offset: usize) -> Result<Option<u32>, BinaryReaderError> {
    let mut index = 0;
    for payload in Parser::new(0).parse_all(module) {
        match payload? {
            Payload::ImportSection(imports) => {
                for import in imports {
                    index += u32::from(matches!(import?.ty, TypeRef::Func(_)));
                }
            }
            Payload::CodeSectionEntry(body) => {
                // What is missing at its end is found there.
                let range = body.range();
                if (range.start..=range.end).contains(&offset) {
                    return Ok(Some(index));
                }
                index += 1;
            }
            _ => {}
        }
    }
    Ok(None)
}

/// The name that a module has for its debuggers.
fn name_of(module: &[u8], index: u32) -> Result<Option<&str>, BinaryReaderError> {
    for payload in Parser::new(0).parse_all(module) {
        let Payload::CustomSection(section) = payload? else { continue };
        let KnownCustom::Name(names) = section.as_known() else { continue };
        for names in names {
            let Name::Function(functions) = names? else { continue };
            for naming in functions {
                let naming = naming?;
                if naming.index == index {
                    let end = naming.name.floor_char_boundary(NAME_BYTES_MAX);
                    return Ok(Some(&naming.name[..end]));
                }
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_is_told_with_its_function_and_its_name() {
        let module = |bad: &str| {
            wat::parse_str(alloc::format!(
                r#"(module (import "forge" "log" (func (param i32 i32 i32) (result i32)))
                     (memory (export "memory") 1)
                     (func $good) (func {bad} (result i32) (i64.const 0)))"#
            ))
            .unwrap()
        };
        let last = |module: &[u8]| {
            let mut end = 0;
            for payload in Parser::new(0).parse_all(module) {
                if let Payload::CodeSectionEntry(body) = payload.unwrap() {
                    end = body.range().end;
                }
            }
            alloc::format!("expected i32, found i64 (at offset {:#x})", end - 1)
        };
        let named = module("$bad");
        let text = last(&named);
        assert_eq!(told(text.clone(), &named), alloc::format!("{text} in function 2, $bad"));
        let nameless = module("");
        let text = last(&nameless);
        assert_eq!(told(text.clone(), &nameless), alloc::format!("{text} in function 2"));
        for other in ["no place", "of a section (at offset 0x9)", "(at offset 0xzz)"] {
            assert_eq!(told(other.into(), &named), other);
        }
    }
}
