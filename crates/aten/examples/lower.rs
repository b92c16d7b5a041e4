//! Reads cases from standard input, one a line, and prints for each: which arguments are numbers that became operands, the
//! StableHLO, a line of dashes.
//!
//! `echo 'add.Tensor f32[2,3] f32[3] none' | cargo run -p oxitorch-aten --example lower`
#![allow(clippy::print_stdout)] // printing is what it is for

use oxitorch_aten::case::Case;
use oxitorch_aten::{Arg, Config};

fn main() -> std::io::Result<()> {
    for line in std::io::stdin().lines() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let (numbers, text) = match Case::parse(&line) {
            Ok(case) => (numbers(&case), lower(&case)),
            Err(e) => (Vec::new(), format!("error: {e}\n")),
        };
        println!("case: {line}\n{numbers:?}\n{text}-----");
    }
    Ok(())
}

fn lower(case: &Case) -> String {
    case.text(&Config::default()).unwrap_or_else(|e| format!("error: {:?}: {e}\n", e.kind()))
}

fn numbers(case: &Case) -> Vec<usize> {
    (0..case.args.len()).filter(|&i| matches!(case.args[i], Arg::Scalar(_))).collect()
}
