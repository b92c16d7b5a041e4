//! `oxitorch doctor`: a row of functions, one for each section, that look and give their lines.

mod libraries;
mod locks;

use std::collections::BTreeMap;
use std::env::consts;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use oxitorch_cache::{Folder, Sharing, Store};
use oxitorch_pjrt::{DiscoverOptions, Found, Platform, choose, discover, hardware_present};

use crate::cache;
use crate::facts::Facts;
use crate::machine;
use crate::packages::{Package, Packages, meets, release};
use crate::plugins::{self, Answer, Aot};
use crate::report::{Check, Report};
use oxitorch_format::bytes;
use oxitorch_preflight::compile::cuda;

/// The versions of torch that one core serves.
const TORCH: &str = ">=2.11,<2.16";

/// Looks at everything.
pub(crate) fn examine(facts: &Facts) -> Report {
    let packages = Packages::scan(&facts.site_dirs);
    let sections = [
        machine_section(facts),
        python_section(facts, &packages),
        shim_section(facts),
        plugin_section(facts),
        locks::section(facts),
        conflict_section(&packages),
        libraries::section(facts, &packages),
        settings_section(facts),
    ];
    Report::new(sections.into_iter().flatten().collect())
}

fn machine_section(facts: &Facts) -> Vec<Check> {
    const S: &str = "Machine";
    let mut checks = Vec::new();
    let system = format!("{} on {}", consts::OS, consts::ARCH);
    checks.push(if consts::OS == "linux" && ["x86_64", "aarch64"].contains(&consts::ARCH) {
        Check::ok(S, "system", system)
    } else {
        Check::error(S, "system", system).hint("oxitorch runs on Linux on x86-64 and aarch64")
    });
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let features = machine::cpu_features();
    let processor = format!("{cores} core{}, {}", if cores == 1 { "" } else { "s" }, features.join(" "));
    checks.push(if consts::ARCH == "x86_64" && !features.contains(&"avx2") {
        Check::warn(S, "processor", format!("{cores} cores, no AVX2"))
            .hint("the cpu platform will be slow here")
    } else {
        Check::ok(S, "processor", processor)
    });
    if let Some((total, free)) = machine::memory() {
        let found = format!("{} free of {}", bytes(free), bytes(total));
        checks.push(if free < 2 << 30 {
            Check::warn(S, "memory", found)
                .hint("building the shim takes about 2 GiB, compiling programs up to 1 GiB")
        } else {
            Check::ok(S, "memory", found)
        });
    }
    if let Some(free) = facts.disk_free_bytes {
        let found = format!("{} free for {}", bytes(free), facts.cache_dir.display());
        checks.push(if free < 1 << 30 {
            Check::warn(S, "disk", found).hint("free some space, or set OXITORCH_CACHE_DIR to another disk")
        } else {
            Check::ok(S, "disk", found)
        });
    }
    checks.push(programs_check(S, facts));
    checks.extend(facts.programs.shared.as_deref().map(|place| shared_check(S, place)));
    checks
}

/// Whether compiled programs can be kept for other processes.
fn programs_check(section: &'static str, facts: &Facts) -> Check {
    const NAME: &str = "compiled programs";
    let folder = oxitorch_cache::programs_folder(&facts.cache_dir);
    if !facts.programs.on {
        return Check::warn(section, NAME, "not kept: every process compiles its own")
            .hint("unset OXITORCH_CACHE, and --xla_dump flags in XLA_FLAGS");
    }
    let store = Folder::of_programs(&facts.cache_dir, Sharing::Machine);
    let probe = format!("probe-{}", std::process::id());
    let usable = store.publish(&probe, b"").and_then(|()| store.remove(&probe)).and_then(|_| store.list());
    match usable {
        Ok(files) => {
            let size = files.iter().map(|f| f.size).sum();
            let limit = facts.programs.bytes.unwrap_or(oxitorch_cache::DISK_BYTES);
            Check::ok(section, NAME, format!("{} of {} in {}", bytes(size), bytes(limit), folder.display()))
        }
        Err(e) if store.check().is_err() => {
            Check::error(section, NAME, "not kept, and none is loaded").hint(e.to_string())
        }
        Err(e) => Check::warn(section, NAME, format!("cannot be kept in {}: {e}", folder.display()))
            .hint("set OXITORCH_CACHE_DIR to a folder that can be written"),
    }
}

/// Whether what machines share can be read. Whether it can be written is seen when something is.
fn shared_check(section: &'static str, place: &str) -> Check {
    const NAME: &str = "shared programs";
    let files = cache::open_shared(place).and_then(|shared| shared.contents().list());
    match files {
        Ok(files) => {
            let size = files.iter().map(|f| f.size).sum();
            Check::ok(section, NAME, format!("{} in {place}", bytes(size)))
        }
        Err(e) => Check::warn(section, NAME, format!("cannot be read from {place}: {e}"))
            .hint("docs/caching.md says what OXITORCH_CACHE_SHARED may be"),
    }
}

fn python_section(facts: &Facts, packages: &Packages) -> Vec<Check> {
    const S: &str = "Python";
    let mut checks = Vec::new();
    let place = match &facts.virtual_environment {
        Some(_) => format!("{} ({})", facts.python, facts.executable.display()),
        None => format!("{} ({}, no virtual environment)", facts.python, facts.executable.display()),
    };
    checks.push(if release(&facts.python) >= vec![3, 10] {
        Check::ok(S, "python", place)
    } else {
        Check::error(S, "python", place).hint("Python 3.10 or newer is needed")
    });
    let own = match packages.get("oxitorch") {
        Some(p) => format!("{} ({})", p.version, facts.package.display()),
        None => {
            format!("{} ({}, not installed as a package)", env!("CARGO_PKG_VERSION"), facts.package.display())
        }
    };
    checks.push(if packages.get("oxitorch").is_some() {
        Check::ok(S, "oxitorch", own)
    } else {
        Check::warn(S, "oxitorch", own)
            .hint("`import torch` finds installed packages only; say `import oxitorch` too")
    });
    checks.push(torch_check(S, facts));
    checks.push(match packages.get("numpy") {
        Some(p) => Check::ok(S, "numpy", &p.version),
        None => Check::warn(S, "numpy", "not installed").hint("pip install numpy"),
    });
    checks
}

fn torch_check(section: &'static str, facts: &Facts) -> Check {
    let Some(torch) = &facts.torch else {
        return Check::error(section, "torch", "not installed").hint("pip install 'torch>=2.11,<2.16'");
    };
    let found = format!("{} ({})", torch.version, torch.root.display());
    if meets(&torch.version, TORCH) {
        Check::ok(section, "torch", found)
    } else {
        Check::error(section, "torch", found)
            .hint("torch 2.11 to 2.15 is needed: pip install 'torch>=2.11,<2.16'")
    }
}

fn shim_section(facts: &Facts) -> Vec<Check> {
    const S: &str = "C++ shim";
    let mut checks = Vec::new();
    let mut ready = false;
    if let (Some(torch), Some(shim)) = (&facts.torch, &facts.shim) {
        let path = shim.path.display();
        ready = matches!(shim.r#where.as_str(), "package" | "cache") || shim.path.is_file();
        let name = "for this torch";
        checks.push(match shim.r#where.as_str() {
            "package" => Check::ok(S, name, format!("came with the package ({path})")),
            "cache" => Check::ok(S, name, format!("built ({path})")),
            "override" if ready => Check::ok(S, name, format!("set by OXITORCH_SHIM ({path})")),
            "override" => Check::error(S, name, format!("OXITORCH_SHIM={path}: no such file"))
                .hint("unset OXITORCH_SHIM"),
            "refused" => Check::error(S, name, format!("not loaded ({path})"))
                .hint(shim.error.clone().unwrap_or_default()),
            "missing" => Check::warn(S, name, format!("not built yet for torch {}", torch.version))
                .hint("the first `import torch` builds it in about 30 s; `oxitorch shim build` does it now"),
            other => Check::error(S, name, shim.error.clone().unwrap_or_else(|| other.into()))
                .hint("install oxitorch again: its compiled part is missing"),
        });
    }
    let others = cached_shims(&facts.cache_dir);
    if !others.is_empty() {
        checks.push(Check::ok(S, "cache", shims(&others)));
    }
    checks.push(match (&facts.compiler, &facts.compiler_error) {
        (Some(command), _) => Check::ok(S, "compiler", compiler_version(command)),
        (None, reason) => {
            let reason = reason.as_deref().unwrap_or("none found").lines().next().unwrap_or_default();
            let check =
                if ready { Check::warn(S, "compiler", reason) } else { Check::error(S, "compiler", reason) };
            check.hint("install g++ 11 or newer (Debian: apt-get install g++), or point CXX at a compiler")
        }
    });
    checks
}

/// "for torch 2.11.0, 2.15.0", with the number of builds where a torch has several: of other sources, all but one useless.
fn shims(names: &[String]) -> String {
    let mut of: BTreeMap<&str, usize> = BTreeMap::new();
    for name in names {
        *of.entry(name.split(['+', '-']).next().unwrap_or(name)).or_default() += 1;
    }
    let each = of.iter().map(|(torch, n)| match n {
        1 => (*torch).to_owned(),
        n => format!("{torch} ({n} builds)"),
    });
    format!("for torch {}", each.collect::<Vec<_>>().join(", "))
}

/// The torch versions (and machine and sources) that the cache folder holds shims for.
fn cached_shims(cache: &Path) -> Vec<String> {
    let entries = fs::read_dir(cache.join("shim")).into_iter().flatten().flatten();
    let built = entries.filter(|e| e.path().join("shim.so").is_file());
    let mut names: Vec<String> = built.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// The first line of `--version`.
fn compiler_version(command: &[String]) -> String {
    let said = command.split_first().and_then(|(program, arguments)| {
        Command::new(program).args(arguments).arg("--version").output().ok()
    });
    let text = said.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    text.lines().next().map_or_else(|| command.join(" "), str::to_string)
}

fn plugin_section(facts: &Facts) -> Vec<Check> {
    const S: &str = "Plugins and platform";
    let found = discover(&DiscoverOptions { python_paths: facts.site_dirs.clone(), override_paths: vec![] });
    let first = |platform| found.iter().find(|f: &&Found| f.platform == platform);
    // Each answer takes a second or more, most of it loading.
    let answers: Vec<(Platform, Option<(&Found, Answer)>)> = thread::scope(|scope| {
        let asked =
            Platform::ALL.map(|p| (p, first(p).map(|f| (f, scope.spawn(move || plugins::ask(facts, f))))));
        let joined = asked.map(|(p, a)| (p, a.and_then(|(f, handle)| Some((f, handle.join().ok()?)))));
        joined.into_iter().collect()
    });
    let mut checks: Vec<Check> =
        answers.iter().map(|(p, answer)| plugin_check(S, *p, answer.as_ref())).collect();
    let tpu = answers.iter().find(|(p, _)| *p == Platform::Tpu).and_then(|(_, answer)| answer.as_ref());
    checks.push(aot_check(S, tpu));
    let gpu = answers.iter().find(|(p, _)| *p == Platform::Cuda).and_then(|(_, answer)| answer.as_ref());
    checks.push(gpu_aot_check(S, gpu, cuda::missing(first(Platform::Cuda), &facts.site_dirs)));
    checks.push(platform_check(S, facts, &found));
    checks
}

fn plugin_check(section: &'static str, platform: Platform, answer: Option<&(&Found, Answer)>) -> Check {
    let name = platform.name();
    let present = hardware_present(platform);
    let Some((found, answer)) = answer else {
        let hint = format!("pip install {}", platform.package());
        return match (platform, present) {
            (Platform::Cpu, _) => Check::error(section, name, "no plugin installed").hint(hint),
            (_, true) => {
                Check::warn(section, name, "hardware is here, but no plugin is installed").hint(hint)
            }
            (_, false) => Check::ok(section, name, "no plugin installed, no hardware seen"),
        };
    };
    let package = found.package.as_deref().unwrap_or("plugin");
    let mut text = format!("{package} {}", found.version.as_deref().unwrap_or("of unknown version"));
    if let Some((major, minor)) = answer.api {
        text += &format!(", PJRT API {major}.{minor}");
    }
    if let Some(version) = &answer.stablehlo {
        text += &format!(", StableHLO {version}");
    }
    if let Some(error) = &answer.error {
        let text = format!("{text}\n{error}");
        let hint = format!("pip install --force-reinstall {package}");
        return if present {
            Check::error(section, name, text).hint(hint)
        } else {
            Check::warn(section, name, text)
        };
    }
    match answer.devices.as_slice() {
        [] => text += ", no hardware seen",
        [kind] => text += &format!(", 1 device: {kind}"),
        [kind, ..] => text += &format!(", {} devices: {kind}", answer.devices.len()),
    }
    if let Some(limit) = answer.memory_bytes.and_then(|b| u64::try_from(b).ok()).filter(|b| *b > 0) {
        text += &format!(" with {}", bytes(limit));
    }
    Check::ok(section, name, text)
}

fn platform_check(section: &'static str, facts: &Facts, found: &[Found]) -> Check {
    let name = "chosen";
    let setting = facts.env.iter().find(|v| v.name == "OXITORCH_PLATFORM").and_then(|v| v.value.as_deref());
    let setting = setting.map(str::trim).filter(|s| !s.is_empty());
    // A value that is no platform is reported with the other settings.
    let wanted = setting.and_then(|s| s.to_ascii_lowercase().parse().ok());
    match choose(found, wanted, hardware_present) {
        Ok(f) if wanted.is_some() && !hardware_present(f.platform) => {
            let text =
                format!("{}, because OXITORCH_PLATFORM says so, but no {0} hardware is seen", f.platform);
            Check::error(section, name, text).hint("unset OXITORCH_PLATFORM, or set it to cpu")
        }
        Ok(f) if wanted.is_some() => {
            Check::ok(section, name, format!("{}, because OXITORCH_PLATFORM says so", f.platform))
        }
        Ok(f) => Check::ok(section, name, format!("{}, {}", f.platform, why(f.platform, found))),
        Err(e) => {
            let text = e.to_string();
            let (message, hint) = text.split_once("; hint: ").unwrap_or((&text, ""));
            let check = Check::error(section, name, message);
            if hint.is_empty() { check } else { check.hint(hint.trim_matches('`')) }
        }
    }
}

/// Why the platforms before the chosen one were passed over.
fn why(chosen: Platform, found: &[Found]) -> String {
    let passed = Platform::ALL.into_iter().take_while(|p| *p != chosen);
    let reasons: Vec<String> = passed
        .map(|p| match (hardware_present(p), found.iter().any(|f| f.platform == p)) {
            (false, _) => format!("no {p} hardware"),
            (true, _) => format!("no {p} plugin"),
        })
        .collect();
    if reasons.is_empty() {
        "the first choice".into()
    } else {
        format!("because there is {}", reasons.join(" and "))
    }
}

/// Whether programs can be compiled for TPUs that are not here: what `oxitorch preflight` does.
fn aot_check(section: &'static str, answer: Option<&(&Found, Answer)>) -> Check {
    const NAME: &str = "ahead of time";
    let Some(aot) = answer.and_then(|(_, a)| a.aot.as_ref()) else {
        let found = if answer.is_some() { "libtpu could not be asked" } else { "no libtpu" };
        return Check::ok(section, NAME, found)
            .hint("`oxitorch preflight` compiles for TPUs with it: pip install libtpu");
    };
    let Aot { topology, seconds, error } = aot;
    match error {
        None => {
            let text = format!("libtpu compiles without a TPU ({topology}, {seconds:.1} s)");
            Check::ok(section, NAME, text)
        }
        Some(e) => Check::warn(section, NAME, format!("libtpu does not compile for {topology}: {e}"))
            .hint("`oxitorch preflight` needs that: pip install --force-reinstall libtpu"),
    }
}

/// The same for GPUs; `missing` is what has to be installed besides the plugin.
fn gpu_aot_check(section: &'static str, answer: Option<&(&Found, Answer)>, missing: Option<&str>) -> Check {
    const NAME: &str = "ahead of time, GPUs";
    let besides = missing.map_or(String::new(), |m| format!(" {m}"));
    let Some((found, answer)) = answer else {
        return Check::ok(section, NAME, "no plugin").hint(format!(
            "`oxitorch preflight --slice cuda:h200` compiles with it: pip install {}{besides}",
            Platform::Cuda.package()
        ));
    };
    let package = found.package.as_deref().unwrap_or("the plugin");
    let Some(aot) = &answer.aot else {
        return Check::ok(section, NAME, format!("{package} could not be asked"));
    };
    let Aot { topology, seconds, error } = aot;
    match (error, missing) {
        (None, _) => {
            Check::ok(section, NAME, format!("{package} compiles without a GPU ({topology}, {seconds:.1} s)"))
        }
        (Some(_), Some(missing)) => Check::ok(section, NAME, "no ptxas and libdevice")
            .hint(format!("`oxitorch preflight` compiles for GPUs with them: pip install {missing}")),
        (Some(e), None) => {
            Check::warn(section, NAME, format!("{package} does not compile for {topology}: {e}"))
                .hint(format!("`oxitorch preflight` needs that: pip install --force-reinstall {package}"))
        }
    }
}

fn conflict_section(packages: &Packages) -> Vec<Check> {
    const S: &str = "Conflicts";
    let mut checks = Vec::new();
    for p in packages.iter().filter(|p| p.name != "oxitorch") {
        let names = p.entry_points("torch.backends");
        if !names.is_empty() || p.name == "torch-tpu" {
            let text = format!(
                "{} also registers an outside device with PyTorch, which has room for one",
                p.version
            );
            checks.push(Check::error(S, &p.name, text).hint(format!(
                "pip uninstall {}; to keep both, set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and import the one you want",
                p.name
            )));
        }
    }
    if let Some(p) = packages.get("torchax") {
        let text = format!("{} takes PyTorch's outside device when it is imported", p.version);
        checks.push(Check::warn(S, "torchax", text).hint("do not import it in a program that uses oxitorch"));
    }
    if let Some(p) = packages.get("torch-xla") {
        let text =
            format!("{} is built for one old torch and brings a second XLA into the process", p.version);
        checks.push(
            Check::warn(S, "torch-xla", text)
                .hint("pip uninstall torch_xla, or keep it in another environment"),
        );
    }
    checks.extend(libtpu_clash(S, packages));
    checks.extend(jax_clashes(S, packages));
    if checks.is_empty() {
        checks.push(Check::ok(S, "packages", "none known"));
    }
    checks
}

/// jax pins the libtpu that it works with; another one breaks jax, not oxitorch.
fn libtpu_clash(section: &'static str, packages: &Packages) -> Option<Check> {
    let (jax, libtpu) = (packages.get("jax")?, packages.get("libtpu")?);
    let wanted = jax.requires("libtpu").into_iter().find(|r| !meets(&libtpu.version, r))?;
    let text = format!("jax {} wants libtpu{wanted}, installed is {}", jax.version, libtpu.version);
    Some(
        Check::warn(section, "libtpu", text)
            .hint(format!("if you run jax on this TPU: pip install 'libtpu{wanted}'")),
    )
}

/// jax's own parts belong together; oxitorch uses its plugin packages too.
fn jax_clashes(section: &'static str, packages: &Packages) -> Vec<Check> {
    let Some(jax) = packages.get("jax") else { return Vec::new() };
    let part = |name: &str| ["jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt"].contains(&name);
    let own = release(&jax.version);
    // A jaxlib may be older than its jax, never newer; plugins are of the minor version.
    let clash = |p: &&Package| match p.name.as_str() {
        "jaxlib" => release(&p.version) > own,
        _ => release(&p.version).get(..2) != own.get(..2),
    };
    let clashing = packages.iter().filter(|p| part(&p.name)).filter(clash);
    clashing
        .map(|p| {
            let text = format!("{} does not go with jax {}", p.version, jax.version);
            Check::warn(section, &p.name, text)
                .hint(format!("if you run jax here: pip install '{}=={}'", p.name, jax.version))
        })
        .collect()
}

fn settings_section(facts: &Facts) -> Vec<Check> {
    const S: &str = "Settings";
    let mut checks = Vec::new();
    for v in &facts.env {
        match (&v.value, &v.error) {
            (_, Some(error)) => {
                checks.push(
                    Check::error(S, &v.name, error)
                        .hint(format!("unset {} or give it a value it knows", v.name)),
                );
            }
            (Some(value), None) => checks.push(Check::ok(S, &v.name, value)),
            (None, None) => {}
        }
    }
    let foreign = facts.env_foreign.iter().filter_map(|f| Some((f, f.value.as_deref()?)));
    for (f, value) in foreign {
        checks.push(if f.name == "TORCH_DEVICE_BACKEND_AUTOLOAD" && value == "0" {
            Check::warn(S, &f.name, value)
                .hint("`import torch` does not load oxitorch; say `import oxitorch` after it")
        } else {
            Check::ok(S, &f.name, value)
        });
    }
    if checks.is_empty() {
        checks.push(Check::ok(S, "variables", "none set; `oxitorch env` lists them"));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Status;

    fn packages(dists: &[(&str, &str, &str)]) -> (tempfile::TempDir, Packages) {
        let dir = tempfile::tempdir().unwrap();
        for (name, entry_points, metadata) in dists {
            let info = dir.path().join(format!("{name}.dist-info"));
            fs::create_dir(&info).unwrap();
            fs::write(info.join("entry_points.txt"), entry_points).unwrap();
            fs::write(info.join("METADATA"), metadata).unwrap();
        }
        let found = Packages::scan(&[dir.path().into()]);
        (dir, found)
    }

    #[test]
    fn conflicts() {
        let (_dir, all) = packages(&[
            ("oxitorch-0.1.0", "[torch.backends]\noxitorch = oxitorch:_autoload\n", ""),
            ("torch_tpu-0.2.0", "[torch.backends]\ntpu = torch_tpu:_autoload\n", ""),
            ("torch_xla-2.9.0", "", ""),
            ("jax-0.10.2", "", "Requires-Dist: libtpu==0.0.40.*; extra == 'tpu'\n"),
            ("libtpu-0.0.51", "", ""),
            ("jaxlib-0.10.1", "", ""),
            ("jax_cuda13_pjrt-0.11.0", "", ""),
        ]);
        let got: Vec<(String, Status)> =
            conflict_section(&all).into_iter().map(|c| (c.name, c.status)).collect();
        let expected = [
            ("torch-tpu", Status::Error),
            ("torch-xla", Status::Warn),
            ("libtpu", Status::Warn),
            ("jax-cuda13-pjrt", Status::Warn),
        ];
        assert_eq!(got, expected.map(|(n, s)| (n.to_string(), s)));
        let (_dir, fine) =
            packages(&[("jax-0.10.2", "", "Requires-Dist: libtpu==0.0.51.*\n"), ("libtpu-0.0.51", "", "")]);
        assert_eq!(conflict_section(&fine)[0].status, Status::Ok);
    }

    #[test]
    fn shims_are_counted_by_torch() {
        let names = ["2.11.0+cu130-x86_64-a", "2.15.0-x86_64-a", "2.15.0+cu132-x86_64-b"].map(String::from);
        assert_eq!(shims(&names), "for torch 2.11.0, 2.15.0 (2 builds)");
    }

    #[test]
    fn what_libtpu_compiles_is_told() {
        let found = |aot| {
            let found =
                Found { platform: Platform::Tpu, path: "libtpu.so".into(), package: None, version: None };
            let check = aot_check("S", Some(&(&found, Answer { aot, ..Answer::default() })));
            (check.status, check.found)
        };
        let aot = |error| Aot { topology: "v5e:1x1".into(), seconds: 0.5, error };
        assert_eq!(
            found(Some(aot(None))),
            (Status::Ok, "libtpu compiles without a TPU (v5e:1x1, 0.5 s)".into())
        );
        let (status, text) = found(Some(aot(Some("odd".into()))));
        assert!(status == Status::Warn && text.ends_with("odd"), "{text}");
        assert!(aot_check("S", None).hint.unwrap().contains("pip install libtpu"));
    }

    #[test]
    fn what_compiles_for_gpus_is_told() {
        let found = Found {
            platform: Platform::Cuda,
            path: "cuda.so".into(),
            package: Some("jax-cuda13-pjrt".into()),
            version: None,
        };
        let told = |error: Option<&str>, missing| {
            let aot = Aot { topology: "h200:1x1x1".into(), seconds: 0.5, error: error.map(str::to_owned) };
            let answer = Answer { aot: Some(aot), ..Answer::default() };
            let check = gpu_aot_check("S", Some(&(&found, answer)), missing);
            (check.status, check.found, check.hint.unwrap_or_default())
        };
        let (status, text, _) = told(None, None);
        assert_eq!(
            (status, text.as_str()),
            (Status::Ok, "jax-cuda13-pjrt compiles without a GPU (h200:1x1x1, 0.5 s)")
        );
        let (status, _, hint) = told(Some("no ptxas"), Some("nvidia-cuda-nvcc"));
        assert!(status == Status::Ok && hint.ends_with("pip install nvidia-cuda-nvcc"), "{hint}");
        let (status, text, _) = told(Some("odd"), None);
        assert!(status == Status::Warn && text.ends_with("odd"), "{text}");
        let hint = gpu_aot_check("S", None, Some("nvidia-cuda-nvcc")).hint.unwrap();
        assert!(hint.ends_with("pip install jax-cuda13-pjrt nvidia-cuda-nvcc"), "{hint}");
    }

    #[test]
    fn platforms_that_were_passed_over_are_explained() {
        assert_eq!(why(Platform::Tpu, &[]), "the first choice");
        if !hardware_present(Platform::Tpu) && !hardware_present(Platform::Cuda) {
            assert_eq!(why(Platform::Cpu, &[]), "because there is no tpu hardware and no cuda hardware");
        }
    }
}
