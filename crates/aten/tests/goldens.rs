//! `goldens/<family>/*.txt`: calls of rows (see `oxitorch_aten::case`) and the StableHLO that they become.

use oxitorch_aten::Config;
use oxitorch_aten::case::Case;
use oxitorch_testkit::golden;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    golden::run(&Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens"), render, Vec::new())
}

fn render(line: &str) -> String {
    match Case::parse(line) {
        Err(e) => format!("not a case: {e}"),
        Ok(case) => case.text(&Config::default()).unwrap_or_else(|e| format!("{:?}Error: {e}", e.kind())),
    }
}
