//! No text crashes or hangs it.

use oxitorch_audit::{Settings, findings};

/// What a text gives, without a crash.
fn read(name: &str, text: &str) -> Vec<&'static str> {
    findings(name, text, &Settings::default()).iter().map(|f| f.rule).collect()
}

#[test]
fn what_nests_is_read_or_refused() {
    let forms = [
        ("(", "1", ")"),
        ("[", "", "]"),
        ("{1:", "2", "}"),
        ("-", "1", ""),
        ("not ", "x", ""),
        ("", "x", ".a"),
        ("", "x", "()"),
        ("", "x", "[0]"),
        ("", "x", "+1"),
        ("", "x", " if x else x"),
        ("", "x", "**1"),
        ("lambda:", "0", ""),
        ("f(", "torch.ones(2)", ".item())"),
        ("await ", "x", ""),
        ("x = ", "1", ""),
        ("", "x", " and x"),
        ("", "x", " < x"),
        ("(yield ", "x", ")"),
        ("[x for x in ", "y", "]"),
    ];
    for (before, between, after) in forms {
        for n in [100, 900, 2_400, 4_900, 100_000] {
            let text = format!("import torch\n{}{between}{}\n", before.repeat(n), after.repeat(n));
            let _ = read("a.py", &text);
        }
        let text = format!("import torch\n{}{between}{}\n", before.repeat(100_000), after.repeat(100_000));
        assert_eq!(read("a.py", &text), ["REA001"], "{before}{after}");
    }
    for n in [90, 300, 5_000] {
        let blocks: String = (0..n).map(|i| format!("{}for x in loader:\n", " ".repeat(i))).collect();
        let _ = read("a.py", &format!("import torch\n{blocks}{}x.item()\n", " ".repeat(n)));
    }
}

#[test]
fn broken_texts_are_findings() {
    for text in [
        "def f(:\n",
        "x = (\n",
        "'''",
        "f'{",
        "\u{0}",
        "import torch\n\tif x:\n  y\n",
        "class",
        "f'{x!}'",
        "print 'a'",
    ] {
        assert_eq!(read("a.py", text), ["REA001"], "{text:?}");
    }
    for text in ["{", "[]", "{\"cells\": [{\"cell_type\": \"code\", \"source\": [\"def f(:\"]}]}"] {
        assert_eq!(read("a.ipynb", text), ["REA001"], "{text:?}");
    }
    for name in ["a.yaml", "a.json", "a.sh", "Dockerfile", "requirements.txt", "pyproject.toml", "a.cu"] {
        for text in [
            "",
            "\u{0}",
            "{{{",
            "a: b: c\n- - -",
            "'\"\\",
            "export =",
            "=",
            "/*",
            "FROM\n",
            "\u{e4}\u{e4}: \u{e4} #",
        ] {
            let _ = read(name, text);
        }
    }
}

#[test]
fn any_cut_of_a_text_is_read() {
    let text = "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        if x.sum() > 0: return f'{x.item():.{2}f}'\n        return [y for y in x.cuda()][:1]\n";
    for end in 0..text.len() {
        let _ = read("a.py", &text[..end]);
        let _ = read("a.py", &text[end..]);
    }
}
