//! The CPU plugin, end to end.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use common::{ADD, bytes_of, client, compile, f32s, get, options, plugin, put};
use oxitorch_pjrt::{
    Buffer, BufferType, ClientOptions, CompileOptions, ElementType, Error, ExecuteArgs, Found, HostError,
    OptionValue, Platform, Program, failed_destroys, open,
};

const HOW: ExecuteArgs<'static> = ExecuteArgs { device: None, non_donatable: &[] };

#[test]
fn add_runs() {
    let client = client(1);
    let add = compile(&client, ADD, &[f32s(&[4]), f32s(&[4])]);
    assert_eq!(add.outputs().cloned().collect::<Vec<BufferType>>(), [f32s(&[4])]);
    let a = put(&client, 0, &[1.0, 2.0, 3.0, 4.0], &[4]);
    let b = put(&client, 0, &[10.0, 20.0, 30.0, 40.0], &[4]);
    let out = add.execute(&[&a, &b], &HOW).unwrap();
    assert_eq!(get(&out[0]), [11.0, 22.0, 33.0, 44.0]);
    assert_eq!((out[0].dtype(), out[0].dims(), out[0].size_bytes()), (ElementType::F32, &[4][..], 16));
    assert_eq!(out[0].on_device_bytes().unwrap(), 16);
    drop((add, a, b, out));
    assert_eq!(failed_destroys(), 0);
}

#[test]
fn the_plugin_says_what_it_is() {
    let plugin = plugin();
    assert_eq!(plugin.api_version().0, 0);
    assert!(plugin.attributes().contains_key("stablehlo_current_version"), "{:?}", plugin.attributes());
    assert!(plugin.extensions().iter().any(|e| e.to_string() == "FFI"), "{:?}", plugin.extensions());
    let client = client(3);
    assert_eq!(client.devices().len(), 3);
    assert_eq!(client.devices()[2].index(), 2);
    assert_eq!(client.devices()[0].kind(), "cpu");
    assert_eq!(client.devices()[0].memory_stats().unwrap(), None);
    assert_eq!(client.devices()[0].memories()[0].kind, "device");
}

#[test]
fn the_platform_is_opened_by_choice() {
    let found =
        [Found { platform: Platform::Cpu, path: common::cpu_plugin_path(), package: None, version: None }];
    let two = |_| ClientOptions { cpu_devices: Some(2), ..Default::default() };
    let opened = open(&found, Some(Platform::Cpu), two).unwrap();
    assert_eq!((opened.client.platform(), opened.client.devices().len()), (Platform::Cpu, 2));
    assert!(opened.passed_over.is_empty());
    let error = open(&found, Some(Platform::Tpu), two).unwrap_err();
    assert!(matches!(error, Error::PluginNotFound { platform: Platform::Tpu, .. }), "{error}");
    let error = open(&[], None, two).unwrap_err();
    assert!(matches!(error, Error::PluginNotFound { platform: Platform::Cpu, .. }), "{error}");
    let absent = [Found { path: "/no/such.so".into(), ..found[0].clone() }];
    assert!(matches!(open(&absent, None, two), Err(Error::Load { .. })));
    let not_a_plugin = [Found { path: "/proc/self/exe".into(), ..found[0].clone() }];
    assert!(matches!(open(&not_a_plugin, None, two), Err(Error::Load { .. })));
}

#[test]
fn a_plugin_is_loaded_once() {
    assert!(std::ptr::eq(plugin(), plugin()));
    let options = oxitorch_pjrt::LoadOptions::default();
    let other = oxitorch_pjrt::Plugin::load(Platform::Tpu, &common::cpu_plugin_path(), &options);
    assert!(matches!(other, Err(Error::Load { .. })));
}

#[test]
fn every_element_type_makes_the_round_trip() {
    let client = client(1);
    for &dtype in ElementType::ALL {
        if dtype == ElementType::Token {
            continue;
        }
        let bytes: Vec<u8> = (0..6 * dtype.host_bytes()).map(|i| (i % 2) as u8).collect();
        let buffer = client.buffer_from_host(&bytes, dtype, &[2, 3], &client.devices()[0]).unwrap();
        let mut back = vec![9; bytes.len()];
        buffer.to_host(&mut back).unwrap();
        assert_eq!(back, bytes, "{dtype}");
    }
}

#[test]
fn empty_and_scalar_values_work() {
    let client = client(1);
    let device = &client.devices()[0];
    for dims in [&[0][..], &[3, 0], &[0, 1 << 40]] {
        let empty = client.buffer_from_host(&[], ElementType::F32, dims, device).unwrap();
        empty.to_host(&mut []).unwrap();
        assert_eq!(empty.size_bytes(), 0);
    }
    let scalar = client.buffer_from_host(&bytes_of(&[7.0]), ElementType::F32, &[], device).unwrap();
    assert_eq!(get(&scalar), [7.0]);
    let text = "module { func.func @main(%a: tensor<0xf32>) -> tensor<0xf32> {
      %0 = stablehlo.add %a, %a : tensor<0xf32>
      return %0 : tensor<0xf32> } }";
    let empty = client.buffer_from_host(&[], ElementType::F32, &[0], device).unwrap();
    let out = compile(&client, text, &[f32s(&[0])]).execute(&[&empty], &HOW).unwrap();
    out[0].to_host(&mut []).unwrap();
}

#[test]
fn results_come_row_major_whatever_the_program_did() {
    let client = client(1);
    let text = "module { func.func @main(%a: tensor<2x3xf32>) -> tensor<3x2xf32> {
      %0 = stablehlo.transpose %a, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
      return %0 : tensor<3x2xf32> } }";
    let a = put(&client, 0, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]);
    let out = compile(&client, text, &[f32s(&[2, 3])]).execute(&[&a], &HOW).unwrap();
    assert_eq!(get(&out[0]), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
}

#[test]
fn wrong_sizes_and_shapes_are_refused() {
    let client = client(1);
    let device = &client.devices()[0];
    for (bytes, dims) in
        [(12, &[4][..]), (20, &[4]), (0, &[-1]), (0, &[i64::MAX, i64::MAX]), (8, &[1 << 62, 1 << 62])]
    {
        let result = client.buffer_from_host(&vec![0; bytes], ElementType::F32, dims, device);
        assert!(matches!(result, Err(Error::InvalidArgument { .. })), "{bytes} {dims:?}");
    }
    let x = put(&client, 0, &[1.0, 2.0], &[2]);
    assert!(matches!(x.to_host(&mut [0; 4]), Err(Error::InvalidArgument { .. })));
    assert!(matches!(x.to_host(&mut [0; 12]), Err(Error::InvalidArgument { .. })));
}

#[test]
fn donation_reuses_memory_and_deletes_the_argument() {
    let client = client(1);
    let donor = ADD.replacen("tensor<4xf32>", "tensor<4xf32> {jax.buffer_donor = true}", 1);
    let add = compile(&client, &donor, &[f32s(&[4]), f32s(&[4])]);
    let new = || put(&client, 0, &[1.0; 4], &[4]);
    let (a, b) = (new(), new());
    let address = a.unsafe_pointer().unwrap();

    let kept = add.execute(&[&a, &b], &ExecuteArgs { non_donatable: &[0], ..HOW }).unwrap();
    assert!(!a.is_deleted().unwrap());
    assert_ne!(kept[0].unsafe_pointer().unwrap(), address);

    let out = add.execute(&[&a, &b], &HOW).unwrap();
    assert_eq!(out[0].unsafe_pointer().unwrap(), address);
    assert!(a.is_deleted().unwrap() && !b.is_deleted().unwrap());
    for error in [
        add.execute(&[&a, &b], &HOW).unwrap_err(),
        a.to_host(&mut [0; 16]).unwrap_err(),
        a.wait().unwrap_err(),
        a.unsafe_pointer().unwrap_err(),
        a.copy_to_device(&client.devices()[0]).unwrap_err(),
    ] {
        assert!(matches!(error, Error::Deleted { .. }), "{error}");
    }
    // The same buffer given away and used in one launch.
    let c = new();
    assert!(add.execute(&[&c, &c], &HOW).is_err());
    assert_eq!(get(&add.execute(&[&c, &b], &HOW).unwrap()[0]), [2.0; 4]);
}

#[test]
fn an_external_reference_prevents_donation() {
    let client = client(1);
    let donor = ADD.replacen("tensor<4xf32>", "tensor<4xf32> {jax.buffer_donor = true}", 1);
    let add = compile(&client, &donor, &[f32s(&[4]), f32s(&[4])]);
    let (a, b) = (put(&client, 0, &[1.0; 4], &[4]), put(&client, 0, &[2.0; 4], &[4]));
    let reference = a.external_reference().unwrap();
    let out = add.execute(&[&a, &b], &HOW).unwrap();
    assert_ne!(out[0].unsafe_pointer().unwrap(), reference.address());
    assert_eq!(get(&out[0]), [3.0; 4]);
}

/// The plugin does not lock all that a buffer has, and aborts the process where one goes whose references are miscounted.
#[test]
fn many_threads_may_use_one_buffer() {
    let client = client(2);
    let add = compile(&client, ADD, &[f32s(&[4]), f32s(&[4])]);
    let uses: [fn(&Buffer); 8] = [
        |b| assert_eq!(get(b), [1.0; 4]),
        |b| assert_eq!(*b.bytes().unwrap(), *bytes_of(&[1.0; 4])),
        |b| drop(b.external_reference().unwrap()),
        |b| assert_eq!(b.on_device_bytes().unwrap(), 16),
        |b| b.wait().unwrap(),
        |b| assert!(!b.is_deleted().unwrap()),
        |b| assert_ne!(b.unsafe_pointer().unwrap(), 0),
        |b| assert_eq!(get(&b.copy_to_device(&b.client().devices()[1]).unwrap()), [1.0; 4]),
    ];
    for _ in 0..20 {
        let buffer = put(&client, 0, &[1.0; 4], &[4]);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (buffer, add) = (&buffer, &add);
                scope.spawn(move || {
                    for turn in 0..200 {
                        uses[(thread + turn) % uses.len()](buffer);
                        uses[turn % 3](buffer);
                    }
                    assert_eq!(get(&add.execute(&[buffer, buffer], &HOW).unwrap()[0]), [2.0; 4]);
                });
            }
        });
    }
}

#[test]
fn a_buffer_is_filled_in_place_and_may_be_donated() {
    let client = client(2);
    let donor = ADD.replacen("tensor<4xf32>", "tensor<4xf32> {jax.buffer_donor = true}", 1);
    let add = compile(&client, &donor, &[f32s(&[4]), f32s(&[4])]);
    let filled = |dtype, dims: &[i64], device: usize, bytes: &[u8]| {
        let write = |to: &mut [u8]| to.copy_from_slice(bytes);
        client.buffer_filled(dtype, dims, &client.devices()[device], write).unwrap().unwrap()
    };
    let a = filled(ElementType::F32, &[4], 0, &bytes_of(&[1.0, 2.0, 3.0, 4.0]));
    let address = a.unsafe_pointer().unwrap();
    assert_eq!((address % 64, get(&a)), (0, vec![1.0, 2.0, 3.0, 4.0]));
    let out = add.execute(&[&a, &put(&client, 0, &[1.0; 4], &[4])], &HOW).unwrap();
    assert_eq!(out[0].unsafe_pointer().unwrap(), address);
    assert_eq!((get(&out[0]), a.is_deleted().unwrap()), (vec![2.0, 3.0, 4.0, 5.0], true));

    let other = filled(ElementType::S16, &[], 1, &[7, 1]);
    assert_eq!((other.device().index(), other.dims(), other.dtype()), (1, &[][..], ElementType::S16));
    let mut back = [0; 2];
    other.to_host(&mut back).unwrap();
    assert_eq!(back, [7, 1]);
    assert_eq!(filled(ElementType::F32, &[0, 3], 0, &[]).size_bytes(), 0);
}

#[test]
fn what_cannot_be_filled_in_place_is_said() {
    let client = client(1);
    let no = |_: &mut [u8]| panic!("there is nothing to fill");
    // On the host an element has a byte, in the plugin perhaps half of one.
    let packed = client.buffer_filled(ElementType::S4, &[4], &client.devices()[0], no).unwrap();
    assert!(packed.is_none());
    for dims in [&[-1][..], &[i64::MAX, i64::MAX]] {
        let result = client.buffer_filled(ElementType::F32, dims, &client.devices()[0], no);
        assert!(matches!(result, Err(Error::InvalidArgument { .. })), "{dims:?}");
    }
    let other = common::client(1);
    let result = client.buffer_filled(ElementType::F32, &[1], &other.devices()[0], no);
    assert!(matches!(result, Err(Error::InvalidArgument { .. })));
}

#[test]
fn a_view_calls_back_when_it_is_gone() {
    let client = client(1);
    let owner = put(&client, 0, &[1.0, 2.0, 3.0, 4.0], &[4]);
    let address = owner.unsafe_pointer().unwrap();
    let gone = Arc::new(AtomicBool::new(false));
    let flag = gone.clone();
    let on_delete = move || flag.store(true, Ordering::SeqCst);
    // SAFETY: `owner` outlives the view.
    let view =
        unsafe { client.view_of_device_memory(address, f32s(&[2, 2]), &client.devices()[0], on_delete) }
            .unwrap();
    assert_eq!(get(&view), [1.0, 2.0, 3.0, 4.0]);
    drop(view);
    wait_for(|| gone.load(Ordering::SeqCst));
}

fn wait_for(condition: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed().as_secs() < 10, "it did not happen");
        std::thread::yield_now();
    }
}

#[test]
fn executables_go_through_bytes() {
    let client = client(2);
    let params = [f32s(&[4]), f32s(&[4])];
    let on_second = CompileOptions { device_ordinal: Some(1), ..options(&params) };
    let add = client.compile(&Program::mlir(ADD.as_bytes()), &on_second).unwrap();
    let bytes = add.serialize().unwrap();
    drop(add);
    let add = client.deserialize(&bytes, &options(&params)).unwrap();
    assert_eq!(add.devices().map(|d| d.index()).collect::<Vec<_>>(), [1]);
    let a = put(&client, 1, &[1.0; 4], &[4]);
    assert_eq!(get(&add.execute(&[&a, &a], &HOW).unwrap()[0]), [2.0; 4]);
    // Damage makes the plugin abort, so it must not see it.
    for damaged in [&bytes[..bytes.len() / 2], b"", b"garbage", &bytes[..bytes.len() - 1]] {
        let error = client.deserialize(damaged, &options(&params)).unwrap_err();
        assert!(matches!(error, Error::BadSerialized { .. }), "{error}");
    }
    let mut flipped = bytes.clone();
    *flipped.last_mut().unwrap() ^= 0x55;
    assert!(client.deserialize(&flipped, &options(&params)).is_err());
}

#[test]
fn a_program_from_bytes_still_reuses_the_memory_it_is_given() {
    let client = client(1);
    let params = [f32s(&[4]), f32s(&[4])];
    let donor = ADD.replacen("tensor<4xf32>", "tensor<4xf32> {jax.buffer_donor = true}", 1);
    let bytes = compile(&client, &donor, &params).serialize().unwrap();
    let add = client.deserialize(&bytes, &options(&params)).unwrap();
    let (a, b) = (put(&client, 0, &[1.0; 4], &[4]), put(&client, 0, &[2.0; 4], &[4]));
    let address = a.unsafe_pointer().unwrap();
    let out = add.execute(&[&a, &b], &HOW).unwrap();
    assert_eq!(get(&out[0]), [3.0; 4]);
    assert_eq!(out[0].unsafe_pointer().unwrap(), address);
    assert!(a.is_deleted().unwrap() && !b.is_deleted().unwrap());
}

#[test]
fn a_program_can_be_asked_about() {
    let client = client(1);
    let add = compile(&client, ADD, &[f32s(&[4]), f32s(&[4])]);
    assert_eq!(add.name().unwrap(), "main");
    assert_eq!(add.replicas_and_partitions().unwrap(), (1, 1));
    let cost = add.cost_analysis().unwrap();
    assert_eq!(cost["flops"].to_string(), "4");
    let memory = add.memory_stats().unwrap();
    assert_eq!((memory.argument, memory.output, memory.temp), (32, 16, 0));
    let optimized = add.optimized_program().unwrap();
    assert_eq!(optimized.format, "hlo_with_config");
    let text = optimized.text().unwrap();
    assert!(text.starts_with("HloModule main"), "{text}");
    assert!(text.contains("\nENTRY %") && text.contains("f32[4]{0} parameter(0)"), "{text}");
    assert!(text.contains("f32[4]{0} add(%") || text.contains("f32[4]{0} fusion(%"), "{text}");
    assert_eq!(oxitorch_pjrt::OptimizedProgram { format: "other".into(), ..optimized.clone() }.text(), None);
    assert!(!optimized.code.is_empty() && !add.fingerprint().unwrap().is_empty());
}

#[test]
fn a_portable_program_runs_on_any_device() {
    let client = client(3);
    let portable = CompileOptions { portable: true, ..options(&[f32s(&[4]), f32s(&[4])]) };
    let add = client.compile(&Program::mlir(ADD.as_bytes()), &portable).unwrap();
    for device in client.devices() {
        let a = put(&client, device.index(), &[1.0; 4], &[4]);
        let out = add.execute(&[&a, &a], &ExecuteArgs { device: Some(device), ..HOW }).unwrap();
        assert_eq!(out[0].device().index(), device.index());
        assert_eq!(get(&out[0]), [2.0; 4]);
    }
    let fixed = compile(&client, ADD, &[f32s(&[4]), f32s(&[4])]);
    let a = put(&client, 0, &[1.0; 4], &[4]);
    let elsewhere = ExecuteArgs { device: Some(&client.devices()[1]), ..HOW };
    assert!(matches!(fixed.execute(&[&a, &a], &elsewhere), Err(Error::InvalidArgument { .. })));
}

#[test]
fn buffers_move_between_devices_and_memories() {
    let client = client(2);
    let a = put(&client, 0, &[1.0, 2.0], &[2]);
    let b = a.copy_to_device(&client.devices()[1]).unwrap();
    assert_eq!((b.device().index(), get(&b)), (1, vec![1.0, 2.0]));
    let device = &client.devices()[0];
    let host = device.memories().iter().find(|m| m.kind == "unpinned_host").unwrap();
    assert_eq!(get(&a.copy_to_memory(host, device).unwrap()), [1.0, 2.0]);
}

#[test]
fn parameter_types_are_read_from_the_text_when_not_given() {
    let client = client(1);
    let add = client.compile(&Program::mlir(ADD.as_bytes()), &CompileOptions::default()).unwrap();
    assert_eq!(add.params().unwrap(), [f32s(&[4]), f32s(&[4])]);
}

#[test]
fn options_reach_the_compiler_and_wrong_ones_are_errors() {
    let client = client(1);
    let with =
        |name: &str, value| CompileOptions { overrides: vec![(name.into(), value)], ..Default::default() };
    let compile = |o: &CompileOptions| client.compile(&Program::mlir(ADD.as_bytes()), o).map(|_| ());
    compile(&with("xla_cpu_use_fusion_emitters", OptionValue::Bool(false))).unwrap();
    compile(&with("--xla_backend_optimization_level", OptionValue::Int(0))).unwrap();
    for (name, value, word) in [
        ("nope", OptionValue::Bool(true), "nope"),
        ("xla_cpu_use_fusion_emitters", OptionValue::String("perhaps".into()), "perhaps"),
        ("xla_backend_optimization_level", OptionValue::Int(1 << 40), "int32"),
    ] {
        let error = compile(&with(name, value)).unwrap_err();
        assert!(matches!(error, Error::CompileFailed { .. }), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn events_call_back() {
    let client = client(1);
    let add = compile(&client, ADD, &[f32s(&[4]), f32s(&[4])]);
    let a = put(&client, 0, &[1.0; 4], &[4]);
    let (out, event) = add.execute_with_event(&[&a, &a], &HOW).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    event.on_ready(move |result| sender.send(result.is_ok()).unwrap()).unwrap();
    assert!(receiver.recv_timeout(std::time::Duration::from_secs(10)).unwrap());
    event.wait().unwrap();
    assert!(event.is_ready().unwrap());
    // A panic in a callback stays in Rust.
    out[0].ready_event().unwrap().on_ready(|_| panic!("expected")).unwrap();
    out[0].wait().unwrap();
}

#[test]
fn threads_share_everything() {
    let client = client(1);
    let add = compile(&client, ADD, &[f32s(&[4]), f32s(&[4])]);
    let one = put(&client, 0, &[1.0; 4], &[4]);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut x = add.execute(&[&one, &one], &HOW).unwrap().remove(0);
                for _ in 0..200 {
                    x = add.execute(&[&x, &one], &HOW).unwrap().remove(0);
                }
                assert_eq!(get(&x), [202.0; 4]);
            });
        }
    });
}

#[test]
fn programs_call_rust_functions() {
    let client = client(1);
    let double = |call: &mut oxitorch_pjrt::HostCall<'_>| {
        let by = call.attributes.get("by").and_then(|v| v.as_int()).ok_or("no `by`")?;
        let x = call.args[0].values::<f32>().ok_or("not f32")?.to_vec();
        if x[0] < 0.0 {
            return Err(format!("negative: {}", x[0]).into());
        }
        if x[0] == 50.0 {
            return Err(HostError::NoResult("no double".to_owned()));
        }
        assert!(x[0] < 100.0, "expected panic");
        let out = call.results[0].values_mut::<f32>().ok_or("not f32")?;
        out.iter_mut().zip(&x).for_each(|(o, x)| *o = x * by as f32);
        Ok(())
    };
    client.plugin().register_host_fn("scale", double).unwrap();
    let text = |name: &str| {
        format!(
            "module {{ func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {{
               %0 = stablehlo.custom_call @oxitorch.host_call(%a) {{api_version = 4 : i32,
                 backend_config = {{fn = \"{name}\", by = 3 : i64}}}} : (tensor<2xf32>) -> tensor<2xf32>
               return %0 : tensor<2xf32> }} }}"
        )
    };
    let program = compile(&client, &text("scale"), &[f32s(&[2])]);
    let run = |program: &oxitorch_pjrt::Executable, x: f32| {
        let out = program.execute(&[&put(&client, 0, &[x, 2.0], &[2])], &HOW)?;
        out[0].wait()?;
        Ok::<_, Error>(get(&out[0]))
    };
    assert_eq!(run(&program, 1.0).unwrap(), [3.0, 6.0]);
    assert!(run(&program, -1.0).unwrap_err().to_string().contains("negative: -1"));
    let none = run(&program, 50.0).unwrap_err();
    assert!(matches!(&none, Error::NoResult { message, .. } if message.contains("no double")), "{none:?}");
    assert!(run(&program, 200.0).unwrap_err().to_string().contains("panicked"));
    let unknown = compile(&client, &text("nobody"), &[f32s(&[2])]);
    assert!(run(&unknown, 1.0).unwrap_err().to_string().contains("no function `nobody`"));
    // Serialized programs find the function again.
    let again = client.deserialize(&program.serialize().unwrap(), &options(&[f32s(&[2])])).unwrap();
    assert_eq!(run(&again, 2.0).unwrap(), [6.0, 6.0]);
}

#[test]
fn a_rust_function_shares_its_work_with_the_threads_of_the_program() {
    let client = client(1);
    let squares = |call: &mut oxitorch_pjrt::HostCall<'_>| {
        let parts = call.args[0].values::<f32>().ok_or("not f32")?[0] as usize;
        let done: Vec<AtomicUsize> = (0..4).map(|_| AtomicUsize::new(0)).collect();
        call.threads.share(parts, &|i| {
            assert!(i < 4, "expected panic");
            done[i].fetch_add(i * i + 1, Ordering::Relaxed);
        });
        assert!(call.threads.count() >= 1);
        let out = call.results[0].values_mut::<f32>().ok_or("not f32")?;
        out.iter_mut().zip(&done).for_each(|(o, d)| *o = d.load(Ordering::Relaxed) as f32);
        Ok(())
    };
    client.plugin().register_host_fn("squares", squares).unwrap();
    let text = "module { func.func @main(%a: tensor<1xf32>) -> tensor<4xf32> {
        %0 = stablehlo.custom_call @oxitorch.host_call(%a) {api_version = 4 : i32,
          backend_config = {fn = \"squares\"}} : (tensor<1xf32>) -> tensor<4xf32>
        return %0 : tensor<4xf32> } }";
    let program = compile(&client, text, &[f32s(&[1])]);
    let run = |parts: f32| {
        let out = program.execute(&[&put(&client, 0, &[parts], &[1])], &HOW)?;
        out[0].wait()?;
        Ok::<_, Error>(get(&out[0]))
    };
    for _ in 0..200 {
        assert_eq!(run(4.0).unwrap(), [1.0, 2.0, 5.0, 10.0], "each part once");
    }
    assert_eq!(run(1.0).unwrap(), [1.0, 0.0, 0.0, 0.0]);
    assert_eq!(run(0.0).unwrap(), [0.0; 4]);
    assert!(run(9.0).unwrap_err().to_string().contains("panicked"));
}

/// The control word of SSE in this thread.
#[cfg(target_arch = "x86_64")]
fn control() -> u32 {
    let mut word = 0u32;
    // SAFETY: stores four bytes.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut word, options(nostack)) };
    word
}

/// Sets it.
#[cfg(target_arch = "x86_64")]
fn set_control(word: u32) {
    // SAFETY: loads four bytes, a word that was stored, with other bits for denormals.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &word, options(nostack)) };
}

/// What docs/errors.md says of denormals on the CPU platform: the plugin flushes them in each thread that runs a program,
/// and compiled code does what the thread says.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_plugin_flushes_denormals() {
    const FLUSHES: u32 = 1 << 15 | 1 << 6;
    let client = client(1);
    let look = |call: &mut oxitorch_pjrt::HostCall<'_>| {
        let elsewhere = AtomicUsize::new(0);
        call.threads.share(8, &|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            elsewhere.fetch_or((control() & FLUSHES) as usize, Ordering::Relaxed);
        });
        let out = call.results[0].values_mut::<f32>().ok_or("not f32")?;
        (out[0], out[1]) = ((control() & FLUSHES) as f32, elsewhere.into_inner() as f32);
        if call.attributes.get("keep").and_then(|v| v.as_int()) == Some(1) {
            set_control(control() & !FLUSHES);
        }
        Ok(())
    };
    client.plugin().register_host_fn("control", look).unwrap();
    // The product depends on the call, which so comes first.
    let run = |n: usize, keep: u32| {
        let text = format!(
            "module {{ func.func @main(%a: tensor<{n}xf32>) -> (tensor<2xf32>, tensor<{n}xf32>) {{
               %0 = stablehlo.custom_call @oxitorch.host_call(%a) {{api_version = 4 : i32, backend_config =
                 {{fn = \"control\", keep = {keep} : i64}}}} : (tensor<{n}xf32>) -> tensor<2xf32>
               %1 = stablehlo.slice %0 [0:1] : (tensor<2xf32>) -> tensor<1xf32>
               %2 = stablehlo.reshape %1 : (tensor<1xf32>) -> tensor<f32>
               %3 = stablehlo.constant dense<1.0> : tensor<f32>
               %4 = stablehlo.minimum %2, %3 : tensor<f32>
               %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f32>) -> tensor<{n}xf32>
               %6 = stablehlo.multiply %a, %5 : tensor<{n}xf32>
               return %0, %6 : tensor<2xf32>, tensor<{n}xf32> }} }}"
        );
        let program = compile(&client, &text, &[f32s(&[n as i64])]);
        let out = program.execute(&[&put(&client, 0, &vec![1e-40; n], &[n as i64])], &HOW).unwrap();
        let kept = get(&out[1]).iter().filter(|x| **x != 0.0).count();
        (get(&out[0]), kept)
    };
    for n in [4, 1 << 22] {
        assert_eq!(run(n, 0), (vec![FLUSHES as f32; 2], 0), "{n}");
    }
    // This thread runs a small program alone, and has its own word again afterwards.
    assert_eq!(run(4, 1).1, 4);
    assert_eq!(control() & FLUSHES, 0);
}
