//! The `oxitorch` command without Python around it.

use std::process::ExitCode;

fn main() -> ExitCode {
    let argv: Vec<String> = std::env::args().collect();
    ExitCode::from(oxitorch_cli::run(&argv, std::env::var_os("OXITORCH_CLI_FACTS")) as u8)
}
