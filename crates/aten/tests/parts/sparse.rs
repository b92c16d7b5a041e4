use oxitorch_aten::sparse::{LISTS, Layout, Server, server};

#[test]
fn lists_are_sorted_and_have_nothing_twice() {
    for list in LISTS {
        assert!(list.split_whitespace().is_sorted_by(|a, b| a < b), "{list}");
    }
}

#[test]
fn pointwise_ops_are_shared_in_all_their_forms() {
    for name in ["sin", "sin_", "sin.out", "threshold_backward.grad_input"] {
        for layout in [Layout::Coo, Layout::Compressed] {
            assert_eq!(server(layout, name), Some(Server::Shared), "{name}");
        }
    }
    assert_eq!(server(Layout::Coo, "add.out"), Some(Server::Python));
    assert_eq!(server(Layout::Strided, "add.out"), None);
}
