//! Reads cases from standard input, one a line, and prints the StableHLO of each between lines of dashes.
//!
//! `echo 'add.Tensor f32[2,3] f32[3] none' | cargo run -p oxitorch-aten --example lower`
#![allow(clippy::print_stdout)] // printing is what it is for

use oxitorch_aten::Config;
use oxitorch_aten::case::Case;

fn main() -> std::io::Result<()> {
    for line in std::io::stdin().lines() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let text = match Case::parse(&line) {
            Ok(case) => {
                case.text(&Config::default()).unwrap_or_else(|e| format!("error: {:?}: {e}\n", e.kind()))
            }
            Err(e) => format!("error: {e}\n"),
        };
        println!("case: {line}\n{text}-----");
    }
    Ok(())
}
