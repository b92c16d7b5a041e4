//! What the PJRT plugins say about themselves, asked in a child process: a plugin that aborts must not end the doctor.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use oxitorch_pjrt::{
    Client, ClientOptions, CompileOptions, Found, LoadOptions, NamedValue, Platform, Plugin, Program,
    Topology, hardware_present,
};
use serde::{Deserialize, Serialize};

use crate::facts::Facts;
use oxitorch_preflight::compile::cuda;

/// Longer than any plugin needs on a machine that works; a TPU's first contact takes tens of seconds.
const PROBE_TIMEOUT: Duration = Duration::from_secs(90);

/// The child's answer.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// The version of the PJRT C API.
    pub(crate) api: Option<(i32, i32)>,
    /// The newest StableHLO it reads.
    pub(crate) stablehlo: Option<String>,
    /// The kind of each device, where its hardware is present.
    pub(crate) devices: Vec<String>,
    /// Memory of one device in bytes, if it says.
    pub(crate) memory_bytes: Option<i64>,
    /// Whether it compiles for devices that are not there; nothing where that was not tried.
    pub(crate) aot: Option<Aot>,
    /// What failed.
    pub(crate) error: Option<String>,
}

/// A small program, compiled for devices that are not there.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Aot {
    pub(crate) topology: String,
    /// With making the topology.
    pub(crate) seconds: f64,
    /// What failed.
    pub(crate) error: Option<String>,
}

/// The smallest slices, and about the smallest program.
const TOPOLOGY: &str = "v5e:1x1";
const GPU: &str = "h200:1x1x1";
const PROGRAM: &str = "module @probe { func.func public @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %y = stablehlo.add %x, %x : tensor<8xf32>
  return %y : tensor<8xf32>
} }";

fn try_aot(plugin: &'static Plugin) -> Aot {
    let start = Instant::now();
    let gpus = plugin.platform() == Platform::Cuda;
    let topology = if gpus { GPU } else { TOPOLOGY };
    let make = || -> anyhow::Result<()> {
        let told = if gpus { cuda::topology_options(topology)? } else { vec![] };
        let overrides = if gpus { cuda::overrides() } else { vec![] };
        let options = CompileOptions { overrides, ..CompileOptions::default() };
        Topology::new(plugin, topology, &told)?.compile(&Program::mlir(PROGRAM.as_bytes()), &options)?;
        Ok(())
    };
    // The first line: XLA says where it has looked for its tools in the others.
    let error = make().err().map(|e| e.to_string().lines().next().unwrap_or_default().to_owned());
    Aot { topology: topology.to_owned(), seconds: start.elapsed().as_secs_f64(), error }
}

/// In the child: loads the library, and starts a client where the hardware is present.
pub(crate) fn probe(platform: &str, library: &Path) -> anyhow::Result<String> {
    let platform: Platform = platform.parse()?;
    let mut answer = Answer::default();
    if let Err(e) = ask_plugin(platform, library, &mut answer) {
        answer.error = Some(e.to_string());
    }
    Ok(serde_json::to_string(&answer)? + "\n")
}

fn ask_plugin(platform: Platform, library: &Path, answer: &mut Answer) -> oxitorch_pjrt::Result<()> {
    let present = hardware_present(platform);
    let plugin = Plugin::load(platform, library, &LoadOptions::for_platform(platform, !present))?;
    answer.api = Some(plugin.api_version());
    answer.stablehlo = plugin.attributes().get("stablehlo_current_version").map(version);
    answer.aot = (platform != Platform::Cpu).then(|| try_aot(plugin));
    if present {
        // A look must not take the whole memory of a GPU.
        let extra = if platform == Platform::Cuda {
            vec![("preallocate".into(), NamedValue::Bool(false))]
        } else {
            vec![]
        };
        let client = Client::new(plugin, &ClientOptions { extra, ..Default::default() })?;
        answer.devices = client.devices().iter().map(|d| d.kind().to_string()).collect();
        answer.memory_bytes = client.devices().first().and_then(|d| d.description().memory_limit_bytes());
    }
    Ok(())
}

/// A list [1, 13, 3] as "1.13.3".
fn version(value: &NamedValue) -> String {
    value.to_string().trim_matches(['[', ']']).replace(", ", ".")
}

/// Runs [`probe`] in a child.
pub(crate) fn ask(facts: &Facts, found: &Found) -> Answer {
    let mut command = Command::new(&facts.executable);
    command.args(["-m", "oxitorch", "probe", found.platform.name()]).arg(&found.path);
    let scratch = match tempfile::tempdir() {
        Ok(scratch) => scratch,
        Err(e) => return failed(format!("no folder for the probe: {e}")),
    };
    if found.platform == Platform::Cuda {
        match cuda::flags(&cuda::own_flags(), &facts.site_dirs, scratch.path()) {
            Ok(flags) => _ = command.env("XLA_FLAGS", flags),
            Err(e) => return failed(format!("{e:#}")),
        }
    }
    match run_limited(command, PROBE_TIMEOUT) {
        Ok(json) => serde_json::from_str(&json).unwrap_or_else(|e| failed(format!("unreadable answer: {e}"))),
        Err(reason) => failed(reason),
    }
}

fn failed(reason: String) -> Answer {
    Answer { error: Some(reason), ..Answer::default() }
}

/// Stdout of a command that ends well in time; otherwise how it ended and the last line that it wrote.
fn run_limited(mut command: Command, limit: Duration) -> Result<String, String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("cannot start the probe: {e}"))?;
    let out = drain(child.stdout.take());
    let err = drain(child.stderr.take());
    let deadline = Instant::now() + limit;
    let status = loop {
        match child.try_wait().map_err(|e| e.to_string())? {
            Some(status) => break status,
            None if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("no answer within {} s", limit.as_secs()));
            }
        }
    };
    let (out, err) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
    if status.success() {
        return Ok(out);
    }
    let last = err.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("nothing on stderr");
    Err(format!("the plugin ended the process ({status}): {}", last.trim()))
}

/// Reads a pipe to its end on a thread of its own, so that the writer never waits.
fn drain(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Result<String, String> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run_limited(command, limit)
    }

    #[test]
    fn children_may_answer_abort_or_hang() {
        assert_eq!(shell("echo yes", PROBE_TIMEOUT).unwrap(), "yes\n");
        let aborted = shell("echo 'F0000 check failed' >&2; kill -ABRT $$", PROBE_TIMEOUT).unwrap_err();
        assert!(aborted.contains("signal: 6") && aborted.contains("check failed"), "{aborted}");
        assert_eq!(shell("exec sleep 60", Duration::from_millis(50)).unwrap_err(), "no answer within 0 s");
    }

    #[test]
    fn a_library_that_is_no_plugin_is_an_answer() {
        let answer: Answer =
            serde_json::from_str(&probe("cpu", Path::new("/nonexistent.so")).unwrap()).unwrap();
        assert!(answer.error.unwrap().contains("/nonexistent.so"));
        assert!(probe("abacus", Path::new("x")).is_err());
    }

    #[test]
    fn versions_are_joined() {
        assert_eq!(version(&NamedValue::Ints(vec![1, 13, 3])), "1.13.3");
    }
}
