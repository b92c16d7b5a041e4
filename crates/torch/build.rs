//! Makes the constants of the header that shim and core share: each `OXI_NAME = number` and `#define OXI_NAME number`.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

const HEADER: &str = "csrc/oxitorch_abi.h";

fn main() {
    println!("cargo::rerun-if-changed={HEADER}");
    let header = fs::read_to_string(HEADER).expect("the header of the shim");
    let mut out = String::new();
    for line in header.lines() {
        let code = line.split("//").next().unwrap_or_default();
        let code =
            code.strip_prefix("#define ").map_or_else(|| code.to_owned(), |d| d.replacen(' ', " = ", 1));
        for part in code.split(['{', '}', ',', ';']) {
            let Some((name, value)) = part.split_once('=') else { continue };
            let (name, value) = (name.trim(), value.trim());
            if let (true, Ok(value)) = (name.starts_with("OXI_"), value.parse::<i32>()) {
                // Writing to a String does not fail.
                let _ = writeln!(out, "/// `{name}`\npub(crate) const {name}: i32 = {value};");
            }
        }
    }
    let folder = env::var_os("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&folder).join("constants.rs"), out).expect("cargo's folder can be written");
}
