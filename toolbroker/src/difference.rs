//! What differs between two texts, line by line.
//!
//! Both texts are a server's. Time and space are bounded by the lines
//! compared: where the middle of two texts is too large for that, all of it
//! has changed. What is shown of it is what changed, with a few lines around, and
//! never less. Deliberately absent is any cleverness about moved lines.

/// Lines compared with each other on either side, after equal beginnings and
/// ends are taken off.
const LINES_MAX: usize = 1_000;

/// Lines that stay, shown before and behind what changed.
const AROUND: usize = 3;

/// What changed, with what is around, and how many other lines stay between.
pub(crate) fn shown(old: &str, new: &str) -> String {
    let lines = lines(old, new);
    let changed: Vec<usize> = (0..lines.len()).filter(|at| !lines[*at].starts_with(' ')).collect();
    let mut out: Vec<String> = Vec::new();
    let mut next = 0;
    let skipped = |out: &mut Vec<String>, count: usize| {
        if count > 0 {
            out.push(format!("  ({count} equal lines)"));
        }
    };
    for at in changed {
        let start = at.saturating_sub(AROUND).max(next);
        let end = (at + AROUND + 1).min(lines.len());
        skipped(&mut out, start - next);
        out.extend_from_slice(&lines[start..end]);
        next = end;
    }
    if !out.is_empty() {
        skipped(&mut out, lines.len() - next);
    }
    out.join("\n")
}

/// A text's lines, with all that is in them: a carriage return is a change too.
fn parted(text: &str) -> Vec<&str> {
    text.split_terminator('\n').collect()
}

/// The lines of both, each with what became of it in front: `-` for one that
/// went, `+` for one that came, two spaces for one that stayed.
fn lines(old: &str, new: &str) -> Vec<String> {
    let (old, new) = (parted(old), parted(new));
    let same = |pair: &(&&str, &&str)| pair.0 == pair.1;
    let head = old.iter().zip(&new).take_while(same).count();
    let tail = old[head..].iter().rev().zip(new[head..].iter().rev()).take_while(same).count();
    let (before, after) = (&old[head..old.len() - tail], &new[head..new.len() - tail]);

    let mut out = Vec::new();
    let stay = |line: &&str| format!("  {line}");
    let go = |line: &&str| format!("- {line}");
    let come = |line: &&str| format!("+ {line}");
    out.extend(old[..head].iter().map(stay));
    if before.len() > LINES_MAX || after.len() > LINES_MAX {
        out.extend(before.iter().map(go));
        out.extend(after.iter().map(come));
    } else {
        // The longest common subsequence, from the back.
        let width = after.len() + 1;
        let mut common = vec![0_u16; (before.len() + 1) * width];
        for i in (0..before.len()).rev() {
            for j in (0..after.len()).rev() {
                common[i * width + j] = if before[i] == after[j] {
                    common[(i + 1) * width + j + 1] + 1
                } else {
                    common[(i + 1) * width + j].max(common[i * width + j + 1])
                };
            }
        }
        let (mut i, mut j) = (0, 0);
        while i < before.len() || j < after.len() {
            let (both, one) = (i < before.len() && j < after.len(), j == after.len());
            if both && before[i] == after[j] {
                out.push(stay(&before[i]));
                (i, j) = (i + 1, j + 1);
            } else if one || (both && common[(i + 1) * width + j] >= common[i * width + j + 1]) {
                out.push(go(&before[i]));
                i += 1;
            } else {
                out.push(come(&after[j]));
                j += 1;
            }
        }
    }
    out.extend(old[old.len() - tail..].iter().map(stay));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_that_stay_and_come_are_the_new_text_and_those_that_stay_and_go_the_old() {
        let texts = ["", "a", "a\nb\nc", "b\nc\nd", "a\nx\nc", "c\nb\na", "a\nb\nb\nc", "x\ny"];
        for old in texts {
            for new in texts {
                let lines = lines(old, new);
                let of = |signs: [&str; 2]| -> String {
                    let kept = lines.iter().filter(|line| signs.contains(&&line[..2]));
                    kept.map(|line| &line[2..]).collect::<Vec<_>>().join("\n")
                };
                assert_eq!(of(["  ", "- "]), old);
                assert_eq!(of(["  ", "+ "]), new);
            }
        }
        assert_eq!(lines("a\nb\nc", "a\nx\nc"), ["  a", "- b", "+ x", "  c"]);
    }

    #[test]
    fn every_line_that_changed_is_shown_and_few_others() {
        let old: Vec<String> = (0..5_000).map(|at| format!("line {at}")).collect();
        let mut new = old.clone();
        new[10] = "first".into();
        new[4_990] = "last".into();
        let shown = shown(&old.join("\n"), &new.join("\n"));
        let changed = ["- line 10", "+ first", "- line 4990", "+ last"];
        assert!(changed.iter().all(|line| shown.lines().any(|it| it == *line)), "{shown}");
        assert!(shown.starts_with("  (7 equal lines)\n  line 7\n"), "{shown}");
        assert!(shown.ends_with("  line 4993\n  (6 equal lines)"), "{shown}");
        assert!(shown.lines().filter(|it| it.starts_with("  ")).count() < 20, "{shown}");
        assert_eq!(super::shown("a\nb", "a\nb"), "");
        assert_eq!(super::shown("", "a\nb"), "+ a\n+ b");
        assert_eq!(super::shown("a\nb", "a\r\nb"), "- a\n+ a\r\n  b");
    }

    #[test]
    fn texts_that_are_too_long_are_replaced_as_a_whole() {
        let text = |word: &str| format!("same\n{}", format!("{word}\n").repeat(LINES_MAX + 1));
        let lines = lines(&text("a"), &text("b"));
        assert_eq!(lines.len(), 2 * LINES_MAX + 3);
        assert_eq!(lines[0], "  same");
    }
}
