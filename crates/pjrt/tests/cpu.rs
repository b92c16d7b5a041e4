//! The CPU plugin, end to end.

mod common;

use common::{ADD, client, compile, f32s, get, plugin, put};
use oxitorch_pjrt::{BufferType, ElementType, ExecuteArgs};

#[test]
fn add_runs() {
    let client = client(1);
    let add = compile(&client, ADD, &[f32s(&[4]), f32s(&[4])]);
    assert_eq!(add.outputs().cloned().collect::<Vec<BufferType>>(), [f32s(&[4])]);
    let a = put(&client, 0, &[1.0, 2.0, 3.0, 4.0], &[4]);
    let b = put(&client, 0, &[10.0, 20.0, 30.0, 40.0], &[4]);
    let out = add.execute(&[&a, &b], &ExecuteArgs::default()).unwrap();
    assert_eq!(get(&out[0]), [11.0, 22.0, 33.0, 44.0]);
    assert_eq!((out[0].dtype(), out[0].dims(), out[0].size_bytes()), (ElementType::F32, &[4][..], 16));
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
}
