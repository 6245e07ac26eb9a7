//! Messages with counts: one of a thing is not called several.

use fsdp_formats::internals::encode_value;
use fsdp_layout::{DType, PlainTensor, PlainValue};
use tempfile::TempDir;

use crate::common::fsdp;

/// Words that end with an s and are no plurals.
const NO_PLURALS: [&str; 3] = ["is", "was", "has"];

/// Runs a command, and checks that no line tells of one of several things.
fn check(arguments: &[&str]) {
    let output = fsdp(arguments).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).unwrap();
    for line in text.lines() {
        let words: Vec<&str> = line
            .split(|character: char| !character.is_alphanumeric() && character != '.')
            .filter(|word| !word.is_empty())
            .collect();
        for pair in words.windows(2) {
            let is_plural = pair[1].ends_with('s') && !NO_PLURALS.contains(&pair[1]);
            // A verdict may be about one of all: `in 1 of 1 tensors and values`.
            let is_of_all = line.contains("in 1 of 1 tensors");
            assert!(
                pair[0] != "1" || !is_plural || is_of_all,
                "{arguments:?}: {line}"
            );
        }
    }
}

#[test]
fn one_of_a_thing_is_not_called_several() {
    let parent = TempDir::new().unwrap();
    let place = |name: &str| parent.path().join(name).to_str().unwrap().to_owned();
    let tensor = |dtype: DType, data: Vec<u8>| {
        PlainValue::Tensor(PlainTensor {
            dtype,
            shape: vec![1],
            data,
        })
    };
    let state = |number: f32| {
        PlainValue::Dict(vec![
            (
                "w".into(),
                tensor(DType::F32, number.to_le_bytes().to_vec()),
            ),
            ("c".into(), tensor(DType::Complex32, vec![0; 4])),
            ("empty".into(), PlainValue::Dict(Vec::new())),
            ("step".into(), PlainValue::Bytes(vec![1])),
        ])
    };
    let (first, second) = (place("first.pt"), place("second.pt"));
    for (path, number) in [(&first, 1e-30), (&second, 1e30)] {
        #[expect(clippy::disallowed_methods, reason = "a source is made by hand")]
        std::fs::write(path, encode_value(&state(number)).unwrap()).unwrap();
    }
    #[expect(
        clippy::disallowed_methods,
        reason = "a run and a map are made by hand"
    )]
    {
        std::fs::create_dir(place("run")).unwrap();
        std::fs::write(place("rules"), "c -> d").unwrap();
    }
    let [dcp, flat, cast, file, run] = ["run/step-1", "flat", "cast", "file", "run"].map(place);
    let (weight, rules) = (["--include", "w"], place("rules"));
    check(&["convert", &first, &dcp, "--to", "dcp"]);
    check(&["convert", &first, &flat, "--to", "hf"]);
    check(&[
        "convert",
        &first,
        &flat,
        "--to",
        "hf",
        "--overwrite",
        "--dry-run",
    ]);
    for source in [&first, &second] {
        let convert = ["convert", source, &cast, "--to", "hf", "--overwrite"];
        check(&[&convert[..], &["--dtype", "float16"]].concat());
        check(
            &[
                &convert[..],
                &["--exclude", "c", "--tp", "1", "--tp-rule", "w=replicate"],
            ]
            .concat(),
        );
        check(&[&convert[..], &["--map", &rules, "--exclude", "step"]].concat());
        check(&[&convert[..], &weight].concat());
    }
    check(&[
        "merge", "--from", &first, "--from", &second, &file, "--to", "torch",
    ]);
    check(&["reshard", &first, &file, "--world-size", "1", "--overwrite"]);
    for path in [&first, &dcp, &flat, &cast] {
        check(&["inspect", path]);
        check(&["inspect", path, "--tensors"]);
        check(&["inspect", path, "--tree"]);
        check(&["verify", path, "--level", "deep"]);
        check(&["map", path]);
        check(&["digest", path]);
        check(&["cat", path, "step"]);
        check(&["diff", path, &first]);
        check(&[&["diff", path, &first], &weight[..]].concat());
        check(&["diff", path, &second, "--full"]);
    }
    check(&["ls", &run]);
    check(&["log", &run]);
    check(&["prune", &run, "--keep-last", "1"]);
}
