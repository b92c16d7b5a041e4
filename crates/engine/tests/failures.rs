//! Every call of the plugin fails once: what the script is told, and that everything works afterwards.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::{ADD, NEG, RELU, Returned, Rig, Tensor, client, error, int, options};
use oxitorch_engine::{ArgRef, CacheOptions, Error, ErrorKind, Mode, Options, Target};
use oxitorch_hlo::DType;
use oxitorch_pjrt::Platform;
use oxitorch_testkit::fake_plugin::FakePlugin;

mod common;

/// Who is told that a call has failed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Told {
    /// Who starts the device.
    Starter,
    /// The script.
    Script,
    /// The script where ops are programs of their own. A larger program that fails before it took its inputs is run op
    /// by op, and the second attempt works.
    ScriptIfAlone,
    /// Nobody, and for this reason.
    Nobody(&'static str),
    /// Nobody, since it is called when the device goes.
    NobodyLeft,
    /// The call is not part of the script, and for this reason.
    NotHere(&'static str),
}

use Told::*;

const DESTRUCTOR: Told = Nobody("what is dropped has nobody to tell");
const OPTIONAL: Told = Nobody("not every plugin says it");

/// All calls of the fake plugin.
const CALLS: &[(&str, Told)] = &[
    ("PJRT_Plugin_Initialize", Starter),
    ("PJRT_Plugin_Attributes", Starter),
    ("PJRT_Client_Create", Starter),
    ("PJRT_Client_Destroy", NobodyLeft),
    ("PJRT_Client_PlatformName", Starter),
    ("PJRT_Client_PlatformVersion", Starter),
    ("PJRT_Client_ProcessIndex", Starter),
    ("PJRT_Client_AddressableDevices", Starter),
    ("PJRT_Client_Devices", Starter),
    ("PJRT_Device_GetDescription", Starter),
    ("PJRT_DeviceDescription_Id", Starter),
    ("PJRT_DeviceDescription_ProcessIndex", Starter),
    ("PJRT_DeviceDescription_Kind", Starter),
    ("PJRT_DeviceDescription_DebugString", Starter),
    ("PJRT_DeviceDescription_Attributes", Starter),
    ("PJRT_Device_AddressableMemories", Starter),
    ("PJRT_Device_DefaultMemory", Starter),
    ("PJRT_Device_MemoryStats", OPTIONAL),
    ("PJRT_Memory_Id", Starter),
    ("PJRT_Memory_Kind", Starter),
    ("PJRT_Client_Compile", ScriptIfAlone),
    ("PJRT_LoadedExecutable_Destroy", NobodyLeft),
    ("PJRT_LoadedExecutable_GetExecutable", ScriptIfAlone),
    ("PJRT_LoadedExecutable_AddressableDevices", ScriptIfAlone),
    ("PJRT_Executable_Destroy", NobodyLeft),
    ("PJRT_Executable_NumOutputs", ScriptIfAlone),
    ("PJRT_Executable_OutputElementTypes", ScriptIfAlone),
    ("PJRT_Executable_OutputDimensions", ScriptIfAlone),
    ("PJRT_Executable_SizeOfGeneratedCodeInBytes", OPTIONAL),
    ("PJRT_Executable_GetCompiledMemoryStats", OPTIONAL),
    ("PJRT_Executable_Serialize", NotHere("there is no cache folder")),
    ("PJRT_Executable_DeserializeAndLoad", NotHere("there is no cache folder")),
    ("PJRT_LoadedExecutable_Execute", ScriptIfAlone),
    ("PJRT_Client_BufferFromHostBuffer", Script),
    ("PJRT_Event_Destroy", DESTRUCTOR),
    ("PJRT_Event_IsReady", Script),
    ("PJRT_Event_Await", Script),
    ("PJRT_Event_OnReady", NotHere("it is for what is not ready, and here everything is")),
    ("PJRT_Buffer_Destroy", DESTRUCTOR),
    ("PJRT_Buffer_Delete", NotHere("values go when nobody holds them")),
    ("PJRT_Buffer_IsDeleted", NotHere("it is asked when a launch has failed")),
    ("PJRT_Buffer_OnDeviceSizeInBytes", OPTIONAL),
    ("PJRT_Buffer_ReadyEvent", Script),
    ("PJRT_Buffer_ToHostBuffer", Script),
    ("PJRT_Buffer_UnsafePointer", NotHere("the engine wants no addresses")),
    ("PJRT_Buffer_IncreaseExternalReferenceCount", Script),
    ("PJRT_Buffer_DecreaseExternalReferenceCount", DESTRUCTOR),
    ("PJRT_Buffer_OpaqueDeviceMemoryDataPointer", Script),
    ("PJRT_Client_CreateViewOfDeviceBuffer", NotHere("all memory of values is the plugin's")),
];

/// Calls that are made on one platform only.
fn is_called(function: &str, platform: Platform) -> bool {
    let of_cpu = ["ExternalReferenceCount", "OpaqueDeviceMemory", "CompiledMemoryStats"];
    let of_others = ["ToHostBuffer", "OnDeviceSizeInBytes"];
    let among = |names: &[&str]| names.iter().any(|n| function.contains(n));
    !among(if platform == Platform::Cpu { &of_others } else { &of_cpu })
}

const LUCK: &str = "out of luck";
/// Status codes, and the class that the script gets.
const CODES: [(u32, ErrorKind); 2] = [(13, ErrorKind::Runtime), (8, ErrorKind::OutOfMemory)];

/// What a script saw.
#[derive(Debug, Default)]
struct Seen {
    errors: Vec<Error>,
    /// The values that it read.
    values: Vec<Vec<u8>>,
}

impl Seen {
    fn keep<T>(&mut self, result: Result<T, Error>) -> Option<T> {
        result.map_err(|e| self.errors.push(e)).ok()
    }

    fn is_fine(&self) -> bool {
        self.errors.is_empty() && self.values == vec![vec![7; 16]; 4]
    }
}

/// A script that copies, computes, reads and waits. Each value is read twice: one that is there stays there.
fn script(rig: &Rig) -> Seen {
    let mut seen = Seen::default();
    let x = Tensor::new(DType::F32, &[4]);
    seen.keep(rig.at(1).write(&x, 7).map_err(error));
    let mut call = |line: u32, schema: &str, args: &[ArgRef<'_>]| {
        let result = rig.at(line).dispatch(schema, args).map_err(error);
        match seen.keep(result)?.pop() {
            Some(Returned::New(tensor)) => Some(tensor),
            other => panic!("{other:?}"),
        }
    };
    let y = call(2, NEG, &[x.arg()]);
    let z = y.as_ref().and_then(|y| call(3, ADD, &[y.arg(), x.arg(), int(1)]));
    drop((x, y));
    let w = z.as_ref().and_then(|z| call(4, RELU, &[z.arg()]));
    for (line, tensor) in [(5, &z), (6, &w), (7, &z), (8, &w)] {
        let Some(tensor) = tensor else { continue };
        let read = rig.at(line).read(tensor);
        let read = seen.keep(read);
        seen.values.extend(read);
    }
    seen.keep(rig.at(9).sync());
    seen
}

/// An engine whose waits end with an error instead of never.
fn rig(fake: FakePlugin, platform: Platform, mode: Mode) -> Result<Rig, oxitorch_pjrt::Error> {
    static STARTED: Mutex<Option<Instant>> = Mutex::new(None);
    *STARTED.lock().unwrap() = Some(Instant::now());
    let interrupt = || match *STARTED.lock().unwrap() {
        Some(start) if start.elapsed() > Duration::from_secs(20) => Err(Error::runtime("it hangs")),
        _ => Ok(()),
    };
    let client = client(&fake, platform)?;
    let rig = Rig::of(fake, Target::Client(client), &Options { interrupt, ..options() });
    rig.mode(mode);
    Ok(rig)
}

/// Runs the script again, which now works, and looks whether anything is left of the first run.
fn works(rig: &Rig, what: &str) {
    let again = script(rig);
    assert!(again.is_fine(), "{what}, and then again: {again:?}");
    rig.sync().unwrap();
    assert_eq!(rig.bytes(), 0, "{what}: bytes of values that are gone");
}

#[test]
fn every_call_is_known_here() {
    let mut known: Vec<&str> = CALLS.iter().map(|(name, _)| *name).collect();
    let mut all = FakePlugin::functions().to_vec();
    known.sort_unstable();
    all.sort_unstable();
    assert_eq!(known, all, "each call of the fake plugin has one row in `CALLS`");
}

#[test]
fn what_fails_at_the_start_is_told_there() {
    for (function, _) in CALLS.iter().filter(|(_, told)| *told == Starter) {
        for platform in [Platform::Tpu, Platform::Cpu] {
            let fake = FakePlugin::new();
            fake.fail_once(function, 13, LUCK);
            let e = client(&fake, platform).map(drop).unwrap_err();
            assert!(e.to_string().contains(function) && e.to_string().contains(LUCK), "{e}");
            // A plugin that could not be started can be started again.
            works(&rig(fake, platform, Mode::Fused).unwrap(), function);
        }
    }
}

#[test]
fn what_fails_once_is_told_and_is_over() {
    for mode in Mode::ALL {
        for platform in [Platform::Tpu, Platform::Cpu] {
            for (function, told) in CALLS.iter().filter(|(_, told)| *told != Starter) {
                for (code, kind) in CODES {
                    let times = fails(function, *told, platform, mode, code, kind);
                    let expected = is_called(function, platform) && !matches!(told, NotHere(_) | NobodyLeft);
                    assert_eq!(times > 0, expected, "{function} on {platform} is called {times} times");
                }
            }
        }
    }
}

/// What a call destroys.
fn kind_of(function: &str) -> Option<&'static str> {
    Some(match function {
        "PJRT_Client_Destroy" => "client",
        "PJRT_LoadedExecutable_Destroy" => "loaded executable",
        "PJRT_Executable_Destroy" => "executable",
        "PJRT_Event_Destroy" => "event",
        "PJRT_Buffer_Destroy" => "buffer",
        _ => return None,
    })
}

/// Lets each of a script's calls of a function fail, one in each run; how many there are.
fn fails(function: &str, told: Told, platform: Platform, mode: Mode, code: u32, kind: ErrorKind) -> usize {
    for nth in 0.. {
        let what = format!("{function}, call {nth}, {mode:?}, {platform}, status {code}");
        let fake = FakePlugin::new();
        fake.fail_after(nth, function, code, LUCK);
        let rig = rig(fake, platform, mode).unwrap();
        let seen = script(&rig);
        if rig.fake.calls(function) <= nth {
            assert!(seen.is_fine(), "{what}: nothing has failed: {seen:?}");
            if told == NobodyLeft {
                rig.fake.fail_once(function, code, LUCK);
                kind_of(function).into_iter().for_each(|kind| rig.fake.leaves(kind));
            }
            return nth;
        }
        kind_of(function).into_iter().for_each(|kind| rig.fake.leaves(kind));
        let silent = match told {
            Nobody(_) | NobodyLeft => true,
            // What happens before the next wait may be seen by that: an event that cannot be asked counts as over.
            Script => seen.errors.is_empty() && function == "PJRT_Event_IsReady",
            ScriptIfAlone => mode == Mode::Fused,
            Starter | NotHere(_) => panic!("{what}: it is called"),
        };
        assert_eq!(seen.errors.is_empty(), silent, "{what}: {seen:?}");
        assert!(!silent || seen.is_fine(), "{what}: {seen:?}");
        for e in &seen.errors {
            assert_eq!(e.kind, kind, "{what}: {e}");
            assert!(
                e.message.contains(LUCK) && e.message.contains("\n  called at script.py:"),
                "{what}: {e}"
            );
        }
        works(&rig, &what);
    }
    unreachable!("calls do not come without end")
}

#[test]
fn who_waits_is_told_that_nobody_will_call_back() {
    for nth in 0..3 {
        let rig = rig(FakePlugin::new(), Platform::Tpu, Mode::Fused).unwrap();
        let x = rig.uploaded(DType::F32, &[4], 7);
        let y = rig.at(2).neg(&x);
        rig.fake.hold();
        rig.fake.fail_after(nth, "PJRT_Event_OnReady", 13, LUCK);
        let read = std::thread::scope(|scope| {
            let read = scope.spawn(|| {
                rig.engine.stream(0).unwrap().read_host(&y.by_ref(), &mut [0; 16], oxitorch_engine::Site(3))
            });
            common::eventually("the launch", || rig.fake.calls("PJRT_LoadedExecutable_Execute") > 0);
            std::thread::sleep(Duration::from_millis(10));
            rig.fake.release();
            read.join().unwrap()
        });
        // The launch itself asks to be called back first, for the sake of the account of time.
        assert_eq!(read.is_err(), nth == 1, "{nth}: {read:?}");
        drop((x, y));
        works(&rig, "a held launch");
    }
}

#[test]
fn inputs_that_may_be_gone_are_gone() {
    let rig = rig(FakePlugin::new(), Platform::Tpu, Mode::Fused).unwrap();
    let x = rig.uploaded(DType::F32, &[4], 7);
    let y = rig.at(2).neg(&x);
    let z = rig.at(3).cast(&y, DType::F64);
    drop(x); // its memory is for `y`
    // It is not known whether the plugin has taken it: what it held must not be used again.
    rig.fake.fail_once("PJRT_LoadedExecutable_Execute", 13, LUCK);
    rig.fake.fail("PJRT_Buffer_IsDeleted", 13, LUCK);
    for tensor in [&y, &z] {
        let e = rig.read(tensor).unwrap_err();
        assert!(e.message.contains(LUCK), "{e}");
    }
    assert_eq!(rig.fake.calls("PJRT_LoadedExecutable_Execute"), 1);
    rig.fake.heal("PJRT_Buffer_IsDeleted");
    drop((y, z));
    works(&rig, "a launch that may have taken its inputs");
}

#[test]
fn a_cache_folder_that_fails_costs_a_compile() {
    let folder = tempfile::tempdir().unwrap();
    let run = |broken: Option<&str>| {
        let fake = FakePlugin::new();
        let cache = CacheOptions { disk: Some(folder.path().to_owned()), ..CacheOptions::default() };
        let rig = Rig::with(fake, Platform::Tpu, &Options { cache, ..options() });
        if let Some(function) = broken {
            rig.fake.fail_once(function, 13, LUCK);
        }
        let seen = script(&rig);
        assert!(seen.is_fine(), "{broken:?}: {seen:?}");
        let calls = |f: &str| rig.fake.calls(f);
        (calls("PJRT_Client_Compile"), calls("PJRT_Executable_DeserializeAndLoad"))
    };
    assert_eq!(run(Some("PJRT_Executable_Serialize")), (1, 0));
    assert_eq!(run(None), (1, 0), "it was not kept");
    assert_eq!(run(Some("PJRT_Executable_DeserializeAndLoad")), (1, 1), "it was compiled instead");
    assert_eq!(run(None), (0, 1), "it was kept");
}

#[test]
fn what_cannot_be_compiled_is_tried_again_once() {
    let rig = rig(FakePlugin::new(), Platform::Tpu, Mode::Strict).unwrap();
    rig.fake.fail("PJRT_Client_Compile", 8, LUCK);
    let x = rig.uploaded(DType::F32, &[4], 7);
    for compiles in [1, 2, 2, 2] {
        let e = rig.read(&rig.relu(&x)).unwrap_err();
        assert_eq!(e.kind, ErrorKind::OutOfMemory, "{e}");
        assert_eq!(rig.fake.calls("PJRT_Client_Compile"), compiles);
    }
    // Another program has its own attempts.
    rig.fake.heal("PJRT_Client_Compile");
    assert!(rig.read(&rig.neg(&x)).is_ok());
}
