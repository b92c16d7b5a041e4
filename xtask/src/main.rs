//! Developer automation: `cargo xtask <command>`.

fn main() -> anyhow::Result<()> {
    anyhow::bail!("usage: cargo xtask <command>")
}
