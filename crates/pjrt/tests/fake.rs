//! What only a broken or old plugin does, on the fake one.

use std::path::Path;
use std::sync::Arc;

use oxitorch_pjrt::{
    BufferType, Client, ClientOptions, Code, CompileOptions, ElementType, Error, ExecuteArgs, Platform,
    Plugin, Program, Topology, failed_destroys,
};
use oxitorch_testkit::fake_plugin::FakePlugin;

fn load(fake: &FakePlugin) -> oxitorch_pjrt::Result<&'static Plugin> {
    // SAFETY: the fake's table honours the headers and lives for ever.
    unsafe { Plugin::from_api(Platform::Tpu, fake.table(), Path::new("fake")) }
}

fn client(fake: &FakePlugin) -> Arc<Client> {
    Client::new(load(fake).unwrap(), &ClientOptions::default()).unwrap()
}

fn f32s(n: i64) -> BufferType {
    BufferType::new(ElementType::F32, [n].as_slice())
}

fn taking(params: &[BufferType]) -> CompileOptions {
    CompileOptions { param_types: Some(params.to_vec()), ..Default::default() }
}

fn put(client: &Arc<Client>, n: usize) -> oxitorch_pjrt::Buffer {
    client.buffer_from_host(&vec![1; n * 4], ElementType::F32, &[n as i64], &client.devices()[0]).unwrap()
}

#[test]
fn a_run_leaves_nothing_behind() {
    let fake = FakePlugin::new();
    {
        let client = client(&fake);
        let program =
            client.compile(&Program::mlir(b"output=f32[4] output=s64[]"), &taking(&[f32s(4)])).unwrap();
        let x = put(&client, 4);
        let (results, event) = program.execute_with_event(&[&x], &ExecuteArgs::default()).unwrap();
        event.wait().unwrap();
        let mut bytes = [0; 16];
        results[0].to_host(&mut bytes).unwrap();
        assert_eq!(bytes, [1; 16]);
        assert_eq!((results[1].dtype(), results[1].size_bytes()), (ElementType::S64, 8));
        assert_eq!(fake.live()["buffer"], 3);
    }
    assert!(fake.live().is_empty(), "{:?}", fake.live());
    assert_eq!(failed_destroys(), 0);
}

#[test]
fn a_plugin_without_uninitialized_buffers_fills_none() {
    let fake = FakePlugin::new();
    // SAFETY: as in `load`.
    let plugin = unsafe { Plugin::from_api(Platform::Cpu, fake.table(), Path::new("fake")) }.unwrap();
    let client = Client::new(plugin, &ClientOptions::default()).unwrap();
    let no = |_: &mut [u8]| panic!("there is nothing to fill");
    let device = &client.devices()[0];
    assert!(client.buffer_filled(ElementType::F32, &[4], device, no).unwrap().is_none());
}

#[test]
fn the_client_lives_as_long_as_what_it_made() {
    let fake = FakePlugin::new();
    let client = client(&fake);
    let x = put(&client, 4);
    drop(client);
    assert_eq!(fake.live()["client"], 1);
    drop(x);
    assert!(fake.live().is_empty(), "{:?}", fake.live());
}

#[test]
fn a_newer_plugin_with_larger_structs_is_served() {
    let fake = FakePlugin::new().newer_structs(64);
    let client = client(&fake);
    let program = client.compile(&Program::mlir(b"output=f32[4]"), &taking(&[])).unwrap();
    assert_eq!(program.execute(&[], &ExecuteArgs::default()).unwrap().len(), 1);
}

#[test]
fn a_table_that_is_too_small_is_refused() {
    for (fake, word) in [
        (FakePlugin::new as fn() -> FakePlugin, ""),
        (|| FakePlugin::new().struct_size(0), "too few for a version"),
        (|| FakePlugin::new().struct_size(8), "too few for a version"),
        (|| FakePlugin::new().ending_before("PJRT_Event_Destroy"), "at least"),
        (|| FakePlugin::new().ending_before("PJRT_Executable_OutputDimensions"), "at least"),
        (|| FakePlugin::new().version(1, 0), "1.0"),
    ] {
        let result = load(&fake());
        match word {
            "" => assert!(result.is_ok()),
            _ => {
                let error = result.unwrap_err();
                assert!(matches!(error, Error::Incompatible { .. }), "{error}");
                assert!(error.to_string().contains(word), "{error}");
            }
        }
    }
    // SAFETY: null is allowed.
    let null = unsafe { Plugin::from_api(Platform::Cpu, std::ptr::null(), Path::new("fake")) };
    assert!(matches!(null, Err(Error::Incompatible { .. })));
}

#[test]
fn a_slot_past_the_end_of_the_table_is_not_called() {
    let fake = FakePlugin::new().ending_before("PJRT_Client_CreateViewOfDeviceBuffer").version(0, 41);
    let client = client(&fake);
    // SAFETY: never looked at: the call is refused.
    let view = unsafe { client.view_of_device_memory(64, f32s(4), &client.devices()[0], || {}) };
    let error = view.unwrap_err();
    assert!(matches!(error, Error::Unsupported { version: (0, 41), .. }), "{error}");
    assert!(error.to_string().contains("CreateViewOfDeviceBuffer"), "{error}");
    assert!(Topology::new(client.plugin(), "v5e:2x2", &[]).is_err());
}

#[test]
fn a_null_slot_is_not_called() {
    for slot in ["PJRT_Buffer_UnsafePointer", "PJRT_Event_OnReady"] {
        let fake = FakePlugin::new().without(slot);
        let client = client(&fake);
        let x = put(&client, 4);
        let error = match slot {
            "PJRT_Buffer_UnsafePointer" => x.unsafe_pointer().unwrap_err(),
            _ => x.ready_event().unwrap().on_ready(|_| panic!("not called")).unwrap_err(),
        };
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(slot), "{error}");
    }
    let error = load(&FakePlugin::new().without("PJRT_Plugin_Initialize")).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

#[test]
fn an_absent_extension_is_an_error() {
    let fake = FakePlugin::new();
    // SAFETY: the fake's table honours the headers and lives for ever.
    let plugin = unsafe { Plugin::from_api(Platform::Cpu, fake.table(), Path::new("fake")) }.unwrap();
    assert!(plugin.extensions().is_empty());
    let error = plugin.register_host_fn("f", |_| Ok(())).unwrap_err();
    assert!(error.to_string().contains("does not support the FFI extension"), "{error}");
    let error = load(&fake).unwrap().register_host_fn("f", |_| Ok(())).unwrap_err();
    assert!(error.to_string().contains("host memory"), "{error}");
}

#[test]
fn on_delete_is_never_null() {
    let fake = FakePlugin::new();
    let client = client(&fake);
    // The fake aborts on a null callback, and then says that it has no views.
    // SAFETY: the fake does not look at the memory.
    let view = unsafe { client.view_of_device_memory(64, f32s(4), &client.devices()[0], || {}) };
    assert_eq!(view.unwrap_err().code(), Some(Code::UNIMPLEMENTED));
    assert_eq!(fake.calls("PJRT_Client_CreateViewOfDeviceBuffer"), 1);
    // SAFETY: as above.
    let null = unsafe { client.view_of_device_memory(0, f32s(4), &client.devices()[0], || {}) };
    assert!(matches!(null, Err(Error::InvalidArgument { .. })));
}

#[test]
fn failures_keep_code_and_message_and_leak_nothing() {
    let fake = FakePlugin::new();
    let plugin = load(&fake).unwrap();
    fake.fail("PJRT_Client_Create", 5, "No jellyfish device found.");
    let error = Client::new(plugin, &ClientOptions::default()).unwrap_err();
    assert!(matches!(&error, Error::NoDevice { message, .. } if message.contains("jellyfish")), "{error}");
    fake.fail("PJRT_Client_Create", 2, "lock file");
    let error = Client::new(plugin, &ClientOptions::default()).unwrap_err();
    assert_eq!(error.code(), Some(Code::UNKNOWN));
    fake.heal("PJRT_Client_Create");

    // A failure halfway destroys what was made.
    fake.fail("PJRT_Client_AddressableDevices", 13, "broken");
    assert!(Client::new(plugin, &ClientOptions::default()).is_err());
    fake.heal("PJRT_Client_AddressableDevices");
    assert!(fake.live().is_empty(), "{:?}", fake.live());

    let client = Client::new(plugin, &ClientOptions::default()).unwrap();
    let error = client.compile(&Program::mlir(b"nonsense"), &taking(&[])).unwrap_err();
    assert!(matches!(error, Error::CompileFailed { code: Code::INVALID_ARGUMENT, .. }), "{error}");
    for call in ["PJRT_Executable_NumOutputs", "PJRT_LoadedExecutable_AddressableDevices"] {
        fake.fail(call, 13, "broken");
        assert!(client.compile(&Program::mlir(b"output=f32[4]"), &taking(&[])).is_err());
        fake.heal(call);
    }
    let program = client.compile(&Program::mlir(b"output=f32[4]"), &taking(&[])).unwrap();
    fake.fail("PJRT_LoadedExecutable_Execute", 8, "no room");
    let error = program.execute(&[], &ExecuteArgs::default()).unwrap_err();
    assert!(matches!(&error, Error::OutOfMemory { message } if message == "no room"), "{error}");
    drop((program, client));
    assert!(fake.live().is_empty(), "{:?}", fake.live());
}

#[test]
fn no_devices_is_no_device() {
    let fake = FakePlugin::new().devices(0);
    let error = Client::new(load(&fake).unwrap(), &ClientOptions::default()).unwrap_err();
    assert!(matches!(error, Error::NoDevice { .. }), "{error}");
    assert!(fake.live().is_empty(), "{:?}", fake.live());
}

#[test]
fn a_value_that_fails_says_so_where_it_is_read() {
    let fake = FakePlugin::new();
    let client = client(&fake);
    let program = client.compile(&Program::mlir(b"output=f32[4]"), &taking(&[])).unwrap();
    fake.fail_values(13, "the kernel failed");
    let results = program.execute(&[], &ExecuteArgs::default()).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    results[0].ready_event().unwrap().on_ready(move |r| sender.send(r).unwrap()).unwrap();
    for error in [
        results[0].wait().unwrap_err(),
        results[0].to_host(&mut [0; 16]).unwrap_err(),
        receiver.recv().unwrap().unwrap_err(),
    ] {
        assert!(error.to_string().contains("the kernel failed"), "{error}");
        assert_eq!(error.code(), Some(Code::INTERNAL));
    }
}

#[test]
fn wrong_arguments_do_not_reach_the_plugin() {
    let fake = FakePlugin::new().devices(2);
    let client = client(&fake);
    let program = client.compile(&Program::mlir(b"output=f32[4]"), &taking(&[f32s(4), f32s(2)])).unwrap();
    let (four, two) = (put(&client, 4), put(&client, 2));
    let elsewhere = client.buffer_from_host(&[0; 8], ElementType::F32, &[2], &client.devices()[1]).unwrap();
    let ints = client.buffer_from_host(&[0; 8], ElementType::S32, &[2], &client.devices()[0]).unwrap();
    let square = client.buffer_from_host(&[0; 8], ElementType::F32, &[1, 2], &client.devices()[0]).unwrap();
    let run = |args: &[&oxitorch_pjrt::Buffer]| program.execute(args, &ExecuteArgs::default()).map(|_| ());
    for (args, word) in [
        (&[&four][..], "takes 2 arguments, got 1"),
        (&[&four, &two, &two], "takes 2 arguments, got 3"),
        (&[&four, &ints], "argument 1 must be f32[2], got s32[2]"),
        (&[&four, &square], "argument 1 must be f32[2], got f32[1,2]"),
        (&[&four, &elsewhere], "argument 1 is on device 1"),
    ] {
        let error = run(args).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    let how = ExecuteArgs { non_donatable: &[2], ..Default::default() };
    assert!(program.execute(&[&four, &two], &how).is_err());
    assert_eq!(fake.calls("PJRT_LoadedExecutable_Execute"), 0);
    run(&[&four, &two]).unwrap();
}

#[test]
fn programs_may_run_on_devices_of_other_processes() {
    let fake = FakePlugin::new().devices(2).elsewhere(2);
    let client = client(&fake);
    assert_eq!((client.devices().len(), client.device_ids()), (2, &[0, 1, 2, 3][..]));
    let compile = |replicas, device_ids: &[i32]| {
        let options = CompileOptions { replicas, device_ids: device_ids.to_vec(), ..taking(&[f32s(4)]) };
        client.compile(&Program::mlir(b"output=f32[4]"), &options)
    };
    let all = compile(3, &[2, 1, 0]).unwrap();
    let here: Vec<i32> = all.devices().map(|d| d.id()).collect();
    assert_eq!(here, [1, 0]);
    let put = |device: usize| {
        client.buffer_from_host(&[0; 16], ElementType::F32, &[4], &client.devices()[device]).unwrap()
    };
    let (a, b) = (put(0), put(1));
    assert_eq!(all.execute_sharded(&[&[&b], &[&a]], &[]).unwrap().len(), 2);
    for (replicas, ids, word) in [
        (2, &[0, 4][..], "no device with id 4"),
        (2, &[2, 3], "none of the devices"),
        (2, &[0, 0], "named twice"),
        (2, &[0, 1, 2], "3 are named"),
        (3, &[], "3 devices are needed, the client has 2"),
    ] {
        let error = compile(replicas, ids).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn a_device_that_fails_says_so_in_its_event() {
    let fake = FakePlugin::new().devices(2);
    let client = client(&fake);
    let two = CompileOptions { replicas: 2, ..taking(&[]) };
    let program = client.compile(&Program::mlir(b"output=f32[4]"), &two).unwrap();
    fake.fail_on_device(1, 13, "a bit fell over");
    let (results, done) = program.execute_sharded_with_events(&[&[], &[]], &[]).unwrap();
    done[0].wait().unwrap();
    results[0][0].wait().unwrap();
    for error in [done[1].wait().unwrap_err(), results[1][0].to_host(&mut [0; 16]).unwrap_err()] {
        assert!(error.to_string().contains("a bit fell over"), "{error}");
    }
}

#[test]
fn donated_buffers_are_named() {
    let fake = FakePlugin::new();
    let client = client(&fake);
    let program =
        client.compile(&Program::mlir(b"output=f32[4] donate=1"), &taking(&[f32s(4), f32s(4)])).unwrap();
    let (a, b) = (put(&client, 4), put(&client, 4));
    let keep = ExecuteArgs { non_donatable: &[1], ..Default::default() };
    program.execute(&[&a, &b], &keep).unwrap();
    assert!(!b.is_deleted().unwrap());
    program.execute(&[&a, &b], &ExecuteArgs::default()).unwrap();
    assert!(b.is_deleted().unwrap() && !a.is_deleted().unwrap());
    let error = program.execute(&[&a, &b], &ExecuteArgs::default()).unwrap_err();
    assert!(matches!(&error, Error::Deleted { what } if what.contains("argument 1")), "{error}");
    let error = b.to_host(&mut [0; 16]).unwrap_err();
    assert!(matches!(error, Error::Deleted { .. }), "{error}");
}

#[test]
fn clients_do_not_mix() {
    let fake = FakePlugin::new();
    let (one, two) = (client(&fake), client(&fake));
    let theirs = put(&two, 4);
    let program = one.compile(&Program::mlir(b"output=f32[4]"), &taking(&[f32s(4)])).unwrap();
    let error = program.execute(&[&theirs], &ExecuteArgs::default()).unwrap_err();
    assert!(error.to_string().contains("another client"), "{error}");
    assert!(one.buffer_from_host(&[0; 4], ElementType::F32, &[], &two.devices()[0]).is_err());
    let how = ExecuteArgs { device: Some(&two.devices()[0]), ..Default::default() };
    assert!(program.execute(&[], &how).is_err());
    assert!(theirs.copy_to_device(&one.devices()[0]).is_err());
}
