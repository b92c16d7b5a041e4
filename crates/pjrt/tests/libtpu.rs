//! libtpu without a TPU. There is one for x86-64 alone.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{ADD, plugin_path};
use oxitorch_pjrt::{
    Client, ClientOptions, CompileOptions, Error, LoadOptions, NamedValue, OptionValue, Platform, Plugin,
    Program, Topology, failed_destroys,
};

fn libtpu() -> &'static Plugin {
    let path = plugin_path(Platform::Tpu, "OXITORCH_TPU_PLUGIN").expect(
        "these tests run on libtpu: `pip install libtpu`, or set OXITORCH_TPU_PLUGIN to its libtpu.so",
    );
    Plugin::load(Platform::Tpu, &path, &LoadOptions::for_platform(Platform::Tpu, true)).unwrap()
}

#[test]
fn no_tpu_is_no_device() {
    let handler = || {
        // SAFETY: reads a disposition.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGTERM, std::ptr::null(), &mut action);
            action.sa_sigaction
        }
    };
    let before = handler();
    let error = Client::new(libtpu(), &ClientOptions::default()).unwrap_err();
    assert!(matches!(error, Error::NoDevice { platform: Platform::Tpu, .. }), "{error}");
    assert_eq!(handler(), before);
}

#[test]
fn programs_are_compiled_ahead_of_time() {
    let topology = Topology::new(libtpu(), "v5e:2x2", &[]).unwrap();
    assert_eq!(topology.devices().len(), 4);
    assert_eq!(topology.devices()[0].kind, "TPU v5 lite");
    assert_eq!(topology.devices()[0].memory_limit_bytes(), Some(16_909_334_528));
    assert_eq!(topology.platform().unwrap().0, "tpu");
    assert!(!topology.serialize().unwrap().is_empty());
    let options = CompileOptions { replicas: 4, ..Default::default() };
    let add = topology.compile(&Program::mlir(ADD.as_bytes()), &options).unwrap();
    assert_eq!(add.replicas_and_partitions().unwrap(), (4, 1));
    assert_eq!(add.output_types().unwrap()[0].to_string(), "f32[4]");
    assert!(add.memory_stats().unwrap().argument >= 32);
    assert!(!add.cost_analysis().unwrap().is_empty());
    assert!(!add.optimized_program().unwrap().code.is_empty());
    assert!(!add.serialize().unwrap().is_empty());
    drop((add, topology));
    assert_eq!(failed_destroys(), 0);
}

#[test]
fn what_kills_libtpu_is_refused() {
    let plugin = libtpu();
    for name in ["", "v5e:0x0", "v5e", "v5e:2x0", "v5e:100000x100000"] {
        assert!(matches!(Topology::new(plugin, name, &[]), Err(Error::InvalidArgument { .. })), "{name}");
    }
    for name in ["v5e:3x3", "v99:1x1", "v5e:2x2x2x2"] {
        assert!(matches!(Topology::new(plugin, name, &[]), Err(Error::Status { .. })), "{name}");
    }
    let wrong = [("num_slices".to_string(), NamedValue::String("x".into()))];
    assert!(matches!(Topology::new(plugin, "v5e:2x2", &wrong), Err(Error::InvalidArgument { .. })));

    let topology = Topology::new(plugin, "v5e:2x2", &[]).unwrap();
    let compile =
        |text: &str, options: &CompileOptions| topology.compile(&Program::mlir(text.as_bytes()), options);
    let with = |ty: &str| ADD.replace("tensor<4xf32>", ty);
    let dynamic = compile(&with("tensor<?xf32>"), &CompileOptions::default());
    assert!(matches!(dynamic, Err(Error::InvalidArgument { .. })));
    compile(&with("tensor<?xf32, #stablehlo.bounds<4>>"), &CompileOptions::default()).unwrap();
    let five = CompileOptions { replicas: 5, ..Default::default() };
    assert!(matches!(compile(ADD, &five), Err(Error::InvalidArgument { .. })));
    let unknown =
        CompileOptions { overrides: vec![("nope".into(), OptionValue::Bool(true))], ..Default::default() };
    assert!(matches!(compile(ADD, &unknown), Err(Error::CompileFailed { .. })));
}
