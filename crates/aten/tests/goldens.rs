//! `goldens/<family>/*.txt`: calls of rows (see `oxitorch_aten::case`) and the StableHLO that they become.

use libtest_mimic::{Failed, Trial};
use oxitorch_aten::case::Case;
use oxitorch_aten::{Config, rows};
use oxitorch_testkit::golden;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens");
    let all = dir.clone();
    golden::run(&dir, render, vec![Trial::test("every_row_has_a_case", move || every_row(all))])
}

fn render(line: &str) -> String {
    match Case::parse(line) {
        Err(e) => format!("not a case: {e}"),
        Ok(case) => case.text(&Config::default()).unwrap_or_else(|e| format!("{:?}Error: {e}", e.kind())),
    }
}

fn every_row(dir: PathBuf) -> Result<(), Failed> {
    let cases = golden::inputs(&dir);
    let seen: BTreeSet<&str> = cases.iter().filter_map(|(_, c)| c.split(' ').next()).collect();
    let missing: Vec<_> = rows().map(|(_, r)| r.name).filter(|n| !seen.contains(n)).collect();
    if missing.is_empty() { Ok(()) } else { Err(format!("rows without a case: {missing:?}").into()) }
}
