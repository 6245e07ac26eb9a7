//! Pickles, honest and hostile.

use super::*;
use crate::error::FormatError;
use crate::limits::BeyondLimit;

fn refused(bytes: &[u8]) -> PickleErrorKind {
    parse(bytes).expect_err("must be refused").kind
}

#[test]
fn integers_keep_their_value_in_every_form() {
    for value in [
        0,
        1,
        255,
        256,
        65535,
        65536,
        -1,
        -128,
        -129,
        i64::from(i32::MIN),
        i64::from(i32::MAX) + 1,
        i64::MIN,
        i64::MAX,
    ] {
        let mut bytes = Vec::new();
        write::proto(&mut bytes, 2);
        write::int(&mut bytes, value);
        bytes.push(write::STOP);
        let pickle = parse(&bytes).unwrap();
        assert_eq!(pickle.int(pickle.root()).unwrap(), value);
    }
    let mut bytes = Vec::new();
    write::unsigned(&mut bytes, u64::MAX);
    bytes.push(write::STOP);
    let pickle = parse(&bytes).unwrap();
    assert_eq!(
        *pickle.node(pickle.root()),
        Node::BigInt(&[255, 255, 255, 255, 255, 255, 255, 255, 0])
    );
    assert_eq!(parse(b"\x8a\x00.").map(|p| p.int(p.root())).unwrap(), Ok(0));
}

#[test]
fn a_parsed_list_has_its_items() {
    let pickle = parse(b"\x80\x04]\x94(K\x01\x8c\x01ae.").unwrap();
    let Node::List(items) = pickle.node(pickle.root()) else {
        panic!("no list")
    };
    assert_eq!(
        (pickle.int(items[0]), pickle.str(items[1])),
        (Ok(1), Ok("a"))
    );
}

/// Returns the value of a pickle as Rust shows it.
fn shown(bytes: &[u8]) -> String {
    let pickle = parse(bytes).unwrap();
    format!(
        "{:?}",
        crate::torch::value::value_of(&pickle, pickle.root()).unwrap()
    )
}

#[test]
fn dicts_and_bytes_keep_what_they_are_made_of_however_that_is_spelled() {
    let dict = shown(b"}X\x01\x00\x00\x00aK\x01s.");
    for call in [
        &b"ccollections\nOrderedDict\n]]X\x01\x00\x00\x00aaK\x01aa\x85R."[..],
        b"ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01s\x85R.",
        b"ccollections\ndefaultdict\nc__builtin__\nlist\n}X\x01\x00\x00\x00aK\x01s\x86R.",
    ] {
        assert_eq!(shown(call), dict, "{call:?}");
    }
    assert_eq!(
        shown(b"ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R."),
        shown(b"}.")
    );
    let other = refused(b"ccollections\nOrderedDict\nK\x01\x85R.");
    assert!(
        matches!(
            other,
            PickleErrorKind::Kind {
                found: "an int",
                ..
            }
        ),
        "{other:?}"
    );
    // In protocol 2, older versions of Python call `bytearray` with a text and an encoding, and
    // newer ones with bytes.
    let bytes =
        shown(b"c__builtin__\nbytearray\nX\x03\x00\x00\x00a\xc3\xbfX\x07\x00\x00\x00latin-1\x86R.");
    let call =
        b"c__builtin__\nbytearray\nc_codecs\nencode\nX\x03\x00\x00\x00a\xc3\xbfX\x06\x00\x00\x00latin1\x86R\x85R.";
    assert_eq!(bytes, shown(call));
}

#[test]
fn text_with_surrogates_is_opaque_and_other_bytes_are_no_text() {
    // `pickle.dumps({'a': 'x\udcff'}, 2)`
    let pickle =
        parse(b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01X\x04\x00\x00\x00x\xed\xb3\xbfq\x02s.")
            .unwrap();
    let (_, value) = pickle.dict(pickle.root()).unwrap()[0];
    let Node::Opaque(object) = pickle.node(value) else {
        panic!("{:?}", pickle.node(value))
    };
    assert_eq!(
        (object.module, object.name),
        ("builtins", "str (with surrogates)")
    );
    assert_eq!(
        *pickle.node(pickle.sequence(object.args).unwrap()[0]),
        Node::Bytes(b"x\xed\xb3\xbf"[..].into())
    );
    for bytes in [
        &b"X\x01\x00\x00\x00\xff."[..],
        b"X\x02\x00\x00\x00\xed\xb3.",
        b"X\x04\x00\x00\x00\xed\xb3\xbf\xff.",
    ] {
        assert_eq!(refused(bytes), PickleErrorKind::Text);
    }
}

#[test]
fn unknown_globals_are_named_and_never_built() {
    let value_of = |bytes: &[u8]| {
        let pickle = parse(bytes).unwrap();
        crate::torch::value::value_of(&pickle, pickle.root()).expect_err("must be refused")
    };
    let system = value_of(b"cos\nsystem\nX\x04\x00\x00\x00true\x85R.");
    assert_eq!(
        system.to_string(),
        "pickle refused at byte 21: global `os.system` is not allowed"
    );
    for bytes in [
        &b"cos\nsystem\nX\x04\x00\x00\x00true\x85R."[..],
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02ctorch.storage\n_load_from_bytes\n.",
        b"c__builtin__\neval\n.",
        b"cbuiltins\ngetattr\n.",
        b"ctorch\nload\n.",
    ] {
        let refused = value_of(bytes);
        assert!(
            matches!(&refused, FormatError::Pickle(error) if error.opaque_type().is_some()),
            "{bytes:?}"
        );
    }
    // INST, OBJ, EXT1, GET, persistent text ids and buffers are not even opcodes here.
    for opcode in *b"ioPgpIVSFL\x82\x83\x84\x97\x98" {
        assert_eq!(
            refused(&[opcode, b'.', b'\n']),
            PickleErrorKind::Opcode { opcode }
        );
    }
}

#[test]
fn lengths_are_checked_before_anything_is_allocated() {
    assert!(matches!(
        refused(b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f."),
        PickleErrorKind::Limit(BeyondLimit { what: "length", .. })
    ));
    assert!(matches!(
        refused(b"\x8b\xff\xff\xff\xff."),
        PickleErrorKind::Limit(BeyondLimit {
            what: "integer length",
            ..
        })
    ));
    assert!(matches!(
        refused(b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffa."),
        PickleErrorKind::Limit(_)
    ));
    assert!(matches!(
        refused(b"B\xff\xff\xff\xff."),
        PickleErrorKind::Limit(_)
    ));
    assert!(matches!(
        refused(b"Nr\xff\xff\xff\x7f."),
        PickleErrorKind::Limit(BeyondLimit {
            what: "memo index",
            ..
        })
    ));
    assert_eq!(
        refused(b"j\xff\xff\xff\x7f."),
        PickleErrorKind::Memo { index: 0x7fff_ffff }
    );
    assert_eq!(
        refused(b"\x80\x09."),
        PickleErrorKind::Protocol { protocol: 9 }
    );
}

#[test]
fn what_lies_below_a_mark_is_out_of_reach() {
    for bytes in [
        &b"(0."[..],
        b"N(\x85.",
        b"(2.",
        b"]N(a.",
        b"t.",
        b"(e.",
        b"N.",
        b"(",
    ] {
        let parsed = parse(bytes);
        assert_eq!(parsed.is_ok(), bytes == b"N.", "{bytes:?}");
    }
}

#[test]
fn deep_nesting_is_found_when_walked_and_costs_nothing_before() {
    let mut bytes = vec![write::EMPTY_TUPLE; 1];
    bytes.extend(std::iter::repeat_n(0x85, 100_000));
    bytes.push(write::STOP);
    let pickle = parse(&bytes).unwrap();
    let error = crate::torch::value::value_of(&pickle, pickle.root()).unwrap_err();
    assert!(error.to_string().contains("nesting"), "{error}");
}

#[test]
fn a_list_that_holds_itself_is_an_error() {
    // l = []; l.append(l)
    let pickle = parse(b"]q\x00h\x00a.").unwrap();
    let error = crate::torch::value::value_of(&pickle, pickle.root()).unwrap_err();
    assert!(error.to_string().contains("nesting"), "{error}");
}

#[test]
fn billion_laughs_stay_small() {
    // Each list holds the one before it ten times over.
    let mut bytes = b"]q\x00".to_vec();
    for level in 0..40u8 {
        bytes.extend_from_slice(b"](");
        for _ in 0..10 {
            bytes.extend_from_slice(&[b'h', level]);
        }
        bytes.extend_from_slice(&[b'e', b'q', level + 1]);
    }
    bytes.push(b'.');
    let pickle = parse(&bytes).unwrap();
    let error = crate::torch::value::value_of(&pickle, pickle.root()).unwrap_err();
    assert!(error.to_string().contains("expanded size"), "{error}");

    // A set made of one shared list again and again would copy it each time.
    let mut bytes = b"c__builtin__\nset\nq\x00](".to_vec();
    bytes.extend(std::iter::repeat_n(b'N', 10_000));
    bytes.extend_from_slice(b"e\x85q\x01");
    for _ in 0..10_000 {
        bytes.extend_from_slice(b"h\x00h\x01R0");
    }
    bytes.push(b'.');
    assert!(matches!(
        refused(&bytes),
        PickleErrorKind::Limit(BeyondLimit {
            what: "copies of shared values",
            ..
        })
    ));
}

#[test]
fn every_prefix_is_an_error() {
    let whole = b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94K\x01\x8c\x01b\x94G?\xf0\x00\x00\x00\x00\x00\x00u.";
    assert!(parse(whole).is_ok());
    for end in 0..whole.len() {
        assert!(parse(&whole[..end]).is_err(), "prefix of {end} bytes");
    }
}

#[test]
fn descriptions_of_known_names_keep_their_text() {
    // Digests of opaque values in checkpoints that exist depend on these texts.
    for (module, name, text) in [
        ("builtins", "list", "Builtin(\"list\")"),
        ("builtins", "float", "Builtin(\"float\")"),
        (
            "torch",
            "per_tensor_affine",
            "QScheme(\"per_tensor_affine\")",
        ),
        ("torch", "Size", "Size"),
    ] {
        assert_eq!(Global::lookup(module, name).unwrap().description(), text);
    }
}
