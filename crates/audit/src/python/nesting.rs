//! How deep a text could nest.
//!
//! The parser, the tree's destructor and the walk are recursive. A text that nests deeper than people write is refused
//! before it is parsed, so that none can exhaust the stack. What is counted is an upper bound of the tree's depth: open
//! brackets, indentation, and in each of these the operators, prefixes and suffixes since the last comma.

/// The tree's depth that is still read. `STACK` in `lib.rs` is enough for it.
pub(crate) const MOST: u32 = 10_000;

/// Whether the tree of a text is surely no deeper than [`MOST`].
pub(crate) fn is_shallow(text: &str) -> bool {
    // Each level wants a byte at least.
    text.len() < MOST as usize || deepest(text.as_bytes()) < MOST
}

fn deepest(text: &[u8]) -> u32 {
    // What was counted in the brackets around, and what since the last comma or line of this one.
    let (mut around, mut here, mut most) = (Vec::<u32>::new(), 0u32, 0u32);
    let (mut sum, mut indent, mut at) = (0u32, 0u32, 0usize);
    while at < text.len() {
        let byte = text[at];
        match byte {
            b'#' => at = memchr::memchr(b'\n', &text[at..]).map_or(text.len(), |n| at + n) - 1,
            b'"' | b'\'' => at = after_string(text, at) - 1,
            b'(' | b'[' | b'{' => {
                around.push(here);
                sum += here + 1;
                here = 0;
            }
            b')' | b']' | b'}' => {
                here = around.pop().unwrap_or(0);
                sum = sum.saturating_sub(here + 1);
                here += 1;
            }
            b',' => here = 0,
            b'\n' if around.is_empty() => {
                here = 0;
                let spaces = text[at + 1..].iter().take_while(|b| matches!(b, b' ' | b'\t')).count();
                indent = spaces as u32;
                at += spaces;
            }
            b'\\' if text.get(at + 1) == Some(&b'\n') => at += 1,
            b'.' | b'+' | b'-' | b'*' | b'/' | b'%' | b'@' | b'&' | b'|' | b'^' | b'~' | b'<' | b'>'
            | b'=' | b':' => here += 1,
            _ if byte.is_ascii_alphabetic() => {
                let word = text[at..].iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'_').count();
                if matches!(
                    &text[at..at + word],
                    b"not"
                        | b"lambda"
                        | b"await"
                        | b"if"
                        | b"else"
                        | b"and"
                        | b"or"
                        | b"in"
                        | b"is"
                        | b"yield"
                        | b"for"
                        | b"async"
                ) {
                    here += 1;
                }
                at += word - 1;
            }
            _ => {}
        }
        most = most.max(sum + here + indent);
        at += 1;
    }
    most
}

/// Where a string ends that begins with the quote at `at`. What a formatted string has in it counts as text: it ends at
/// its quote at the latest, and what is behind counts again.
fn after_string(text: &[u8], at: usize) -> usize {
    let quote = text[at];
    let triple = text[at..].starts_with(&[quote; 3]);
    let mut i = at + if triple { 3 } else { 1 };
    while i < text.len() {
        match text[i] {
            b'\\' => i += 1,
            b'\n' if !triple => return i,
            b if b == quote && !triple => return i + 1,
            b if b == quote && text[i..].starts_with(&[quote; 3]) => return i + 3,
            _ => {}
        }
        i += 1;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nests_is_deep_and_what_is_long_is_not() {
        let n = 2 * MOST as usize;
        for (before, between, after) in [
            ("(", "1", ")"),
            ("-", "1", ""),
            ("not ", "x", ""),
            ("", "x", ".a"),
            ("", "x", "()"),
            ("1+", "1", ""),
            ("{1:", "2", "}"),
            ("lambda:", "0", ""),
        ] {
            assert!(!is_shallow(&(before.repeat(n) + between + &after.repeat(n))), "{before}{after}");
        }
        let deep: String = (0..n).map(|i| " ".repeat(i) + "if x:\n").collect();
        assert!(!is_shallow(&deep));
        for flat in ["x = 1\n", "[1, 2, -3],", "f('((((')\n", "# (((\n"] {
            assert!(is_shallow(&flat.repeat(n)), "{flat}");
        }
    }
}
