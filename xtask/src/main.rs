//! Developer automation: `cargo xtask <command>`.

mod schemas;

const USAGE: &str = "usage: cargo xtask <command>

commands:
  schemas --python PATH [--check]   write crates/aten/schemas.txt from the torch of that Python (--check: only compare)";

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("schemas") => schemas::run(&args[1..]),
        _ => anyhow::bail!("{USAGE}"),
    }
}
