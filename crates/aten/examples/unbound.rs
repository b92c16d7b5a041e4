//! Prints the schemas of every overload in `schemas.txt` that PyTorch does not decompose and no row serves.
#![allow(clippy::print_stdout)] // printing is what it is for

use oxitorch_aten::{Schema, bind};

fn main() {
    for line in include_str!("../schemas.txt").lines().filter(|l| !l.starts_with('#')) {
        let Some((tags, text)) = line.split_once(" | ") else { continue };
        let Ok(schema) = Schema::parse(text) else { continue };
        if !tags.contains("implicit") && !tags.contains("view") && bind(&schema).is_none() {
            println!("{line}");
        }
    }
}
