//! The machine: processor, memory, accelerators, who holds the TPU.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Instruction sets that decide how fast XLA's code for this processor is.
pub(crate) fn cpu_features() -> Vec<&'static str> {
    let mut found = Vec::new();
    macro_rules! detect {
        ($check:ident: $($name:tt)*) => { $(if std::arch::$check!($name) { found.push($name); })* };
    }
    #[cfg(target_arch = "x86_64")]
    detect!(is_x86_feature_detected: "avx" "avx2" "fma" "avx512f" "avx512bf16" "avx512fp16");
    #[cfg(target_arch = "aarch64")]
    detect!(is_aarch64_feature_detected: "neon" "fp16" "bf16" "dotprod" "sve");
    found
}

/// The memory of the machine and what of it is free for use, in bytes.
pub(crate) fn memory() -> Option<(u64, u64)> {
    parse_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_meminfo(text: &str) -> Option<(u64, u64)> {
    let field = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib * 1024)
    };
    Some((field("MemTotal")?, field("MemAvailable")?))
}

/// Device files of TPU chips.
pub(crate) fn tpu_files() -> Vec<String> {
    let accel = list("/dev", |name| name.strip_prefix("accel").is_some_and(is_number));
    if accel.is_empty() { list("/dev/vfio", is_number) } else { accel }
}

/// libtpu's lock: one process at a time can have the chips.
pub(crate) const TPU_LOCK: &str = "/tmp/libtpu_lockfile";

/// The process that holds a file's lock.
pub(crate) fn lock_holder(file: &Path) -> Option<u32> {
    holder(&fs::read_to_string("/proc/locks").ok()?, file)
}

/// The ports that some process listens on.
pub(crate) fn listening() -> BTreeSet<u16> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    tables.iter().filter_map(|t| fs::read_to_string(t).ok()).flat_map(|text| parse_tcp(&text)).collect()
}

/// The listening ports of `/proc/net/tcp`: state 0A, the port behind the address, all hexadecimal.
fn parse_tcp(text: &str) -> Vec<u16> {
    let port = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, _, state) = (fields.next()?, fields.next()?, fields.next()?);
        let (_, port) = local.rsplit_once(':')?;
        u16::from_str_radix(port, 16).ok().filter(|_| state == "0A")
    };
    text.lines().skip(1).filter_map(port).collect()
}

/// Finds a file by its inode in the text of `/proc/locks`.
fn holder(locks: &str, file: &Path) -> Option<u32> {
    let inode = format!(":{}", fs::metadata(file).ok()?.ino());
    locks.lines().find_map(|line| {
        // 1: FLOCK  ADVISORY  WRITE 708 00:13:22371 0 EOF
        let fields: Vec<&str> = line.split_whitespace().collect();
        if fields.get(5)?.ends_with(&inode) { fields.get(4)?.parse().ok() } else { None }
    })
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn list(folder: &str, keep: impl Fn(&str) -> bool) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|e| e.file_name().into_string().ok()).filter(|n| keep(n)).collect();
    names.sort();
    names.into_iter().map(|n| format!("{folder}/{n}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_holder_of_a_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let inode = file.as_file().metadata().unwrap().ino();
        let locks = format!(
            "1: POSIX  ADVISORY  READ 5 08:01:1 0 EOF\n2: FLOCK  ADVISORY  WRITE 708 00:13:{inode} 0 EOF\n"
        );
        assert_eq!(holder(&locks, file.path()), Some(708));
        assert_eq!(holder("", file.path()), None);
        assert_eq!(holder(&locks, Path::new("/nonexistent")), None);
    }

    #[test]
    fn listening_ports_are_those_of_the_kernel() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        assert!(listening().contains(&port));
        let text = "  sl  local_address rem_address   st\n   0: 0100007F:20EF 00000000:0000 0A\n   1: 0100007F:2103 0100007F:1F90 01\n";
        assert_eq!(parse_tcp(text), [8431]);
    }

    #[test]
    fn reads_meminfo() {
        assert_eq!(
            parse_meminfo("MemTotal:       2048 kB\nMemAvailable:  1024 kB\n"),
            Some((2 << 20, 1 << 20))
        );
        assert_eq!(parse_meminfo("MemTotal: x"), None);
    }
}
