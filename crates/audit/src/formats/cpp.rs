//! C, C++ and CUDA: lines outside of comments.

use super::{Asked, range_of};

/// Words without one of which no rule strikes.
const WORDS: &[&str] = &["__global__", "PYBIND11_MODULE", "TORCH_LIBRARY", "include"];

pub(super) fn read(text: &str, asked: &mut Asked) {
    let mut in_comment = false;
    for line in text.lines() {
        let mut rest = line;
        let mut code = String::new();
        while !rest.is_empty() {
            if in_comment {
                let Some(end) = rest.find("*/") else { break };
                in_comment = false;
                rest = &rest[end + 2..];
                continue;
            }
            match (rest.find("//"), rest.find("/*")) {
                (Some(line), block) if block.is_none_or(|b| line < b) => {
                    code.push_str(&rest[..line]);
                    break;
                }
                (_, Some(block)) => {
                    code.push_str(&rest[..block]);
                    in_comment = true;
                    rest = &rest[block + 2..];
                }
                _ => {
                    code.push_str(rest);
                    break;
                }
            }
        }
        if WORDS.iter().any(|w| code.contains(w)) {
            asked.line(&code, range_of(text, line.trim()));
        }
    }
}
