//! Text from outside on its way to a terminal, a log or a model: which of its characters
//! do something else than be seen.

use alloc::string::String;

/// Text from outside, made safe to print: what is in it is seen.
#[must_use]
pub fn visible(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    let mut before = ' ';
    for c in text.chars() {
        if is_plain(before, c) {
            safe.push(c);
        } else {
            safe.extend(c.escape_unicode());
        }
        before = c;
    }
    safe
}

/// Whether a character that comes after `before` is seen, or does to that one what it is
/// there for, and does nothing else.
#[must_use]
pub fn is_plain(before: char, c: char) -> bool {
    !c.is_control() && !moves_others(c) && (!is_unseen(c) || joins(before, c))
}

/// Characters that reorder the text around them on a terminal (Unicode's bidirectional
/// controls), and those that begin another line of it.
fn moves_others(c: char) -> bool {
    matches!(
        c,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    )
}

/// Characters that a terminal shows nothing of and a model reads (Unicode's
/// `Default_Ignorable_Code_Point`).
fn is_unseen(c: char) -> bool {
    matches!(
        c,
        '\u{ad}'
            | '\u{34f}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200d}'
            | '\u{2060}'..='\u{2065}'
            | '\u{206a}'..='\u{206f}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}'
            | '\u{ffa0}'
            | '\u{fff0}'..='\u{fff8}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}'
    )
}

/// Whether the second does to the first what it is there for, as in an emoji or in
/// Persian: one of them says nothing by itself.
fn joins(before: char, c: char) -> bool {
    let is_seen = !before.is_ascii() && !is_unseen(before);
    match c {
        '\u{fe0e}' | '\u{fe0f}' | '\u{200c}' => is_seen,
        '\u{200d}' => is_seen || before == '\u{fe0f}',
        _ => false,
    }
}
