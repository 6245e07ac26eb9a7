//! The files of tensor-parallel ranks: ranks that compute with their parts get what one rank gets
//! with the whole.

use std::path::Path;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_tools::convert::{ConvertOptions, Converted, OutputFormat, convert};
use fsdp_tools::map::{Map, Mapped};
use fsdp_tools::tensor_parallel::{Rules, TensorParallelPlan};
use fsdp_tools::verify::{Level, VerifyOptions, verify};
use tempfile::TempDir;

use crate::foreign::{assert_converts, differences, opened, refused};
use crate::parallel_model::{
    Held, Model, TOKENS, files_of_rank, gpt2, held, llama, logits, phi3, qwen2,
};

fn plan(model: &Model, source: &dyn Checkpoint, ranks: usize) -> TensorParallelPlan {
    let values = [
        ("heads".to_owned(), model.heads),
        ("kv_heads".to_owned(), model.kv_heads),
    ]
    .into();
    TensorParallelPlan::new(
        source.metadata(),
        &Rules::new::<&str>(&[], values).unwrap(),
        ranks,
    )
    .unwrap()
}

fn export(
    source: &dyn Checkpoint,
    plan: &TensorParallelPlan,
    to: &Path,
    max_file_bytes: u64,
) -> Result<Converted, FileError> {
    let options = ConvertOptions {
        tensor_parallel: Some(plan),
        ..ConvertOptions::default()
    };
    convert(
        source,
        to,
        OutputFormat::SafetensorsDirectory { max_file_bytes },
        options,
    )
}

#[test]
fn ranks_compute_with_their_parts_what_one_computes_with_the_whole() {
    for (name, model) in [
        ("llama", llama()),
        ("qwen2", qwen2()),
        ("phi3", phi3()),
        ("gpt2", gpt2()),
    ] {
        let parent = TempDir::new().unwrap();
        let path = parent.path().join("source.safetensors");
        model.write(&path);
        let source = opened(&path);
        let whole = logits(&[held(std::slice::from_ref(&path))], &model);
        assert_eq!(whole.len(), TOKENS.len() * 100);
        let most = if name == "llama" { 8 } else { 4 };
        for ranks in [1, 2, 4, 8].into_iter().filter(|&ranks| ranks <= most) {
            let to = parent.path().join(format!("{ranks}"));
            // Small files, so that a rank has several.
            export(&*source, &plan(&model, &*source, ranks), &to, 4000).unwrap();
            let parts: Vec<Held> = (0..ranks)
                .map(|rank| held(&files_of_rank(&to, rank)))
                .collect();
            let found = logits(&parts, &model);
            let error = found
                .iter()
                .zip(&whole)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f64::max);
            assert!(
                found.len() == whole.len() && error < 1e-9,
                "{name} on {ranks} ranks: {error}"
            );
            // Only tensors that are not cut are on every rank.
            let elements = |held: &Held| held.values().map(|matrix| matrix.at.len()).sum::<usize>();
            let all = model
                .tensors
                .iter()
                .map(|(_, shape)| shape.iter().product::<usize>())
                .sum::<usize>();
            let most = parts.iter().map(elements).max().unwrap();
            assert!(
                most * ranks < all * 2,
                "{name}: {most} of {all} elements on one of {ranks} ranks"
            );
        }
    }
}

#[test]
fn the_parts_of_ranks_read_as_the_whole_bit_for_bit() {
    for model in [llama(), qwen2(), phi3(), gpt2()] {
        let parent = TempDir::new().unwrap();
        let path = parent.path().join("source.safetensors");
        model.write(&path);
        let source = opened(&path);
        for ranks in [1, 2, 4] {
            let to = parent.path().join(format!("{ranks}"));
            export(&*source, &plan(&model, &*source, ranks), &to, 1 << 30).unwrap();
            let read = opened(&to);
            assert_eq!(differences(&*source, &*read), [""; 0], "{ranks} ranks");
            assert_converts(&*read);
            let report = verify(&*read, Level::Deep, VerifyOptions::default()).unwrap();
            assert_eq!(report.replicas > 0, ranks > 1, "copies of norms");
        }
    }
}

#[test]
fn matrices_that_a_map_joins_are_cut_as_servers_have_them() {
    for model in [llama(), qwen2()] {
        let parent = TempDir::new().unwrap();
        let (path, to) = (
            parent.path().join("source.safetensors"),
            parent.path().join("to"),
        );
        model.write(&path);
        let source = opened(&path);
        let values = [
            ("heads".to_owned(), model.heads),
            ("kv_heads".to_owned(), model.kv_heads),
        ]
        .into();
        let map = |name| Map::builtin(name, &values).unwrap().unwrap();
        let fused = Mapped::new(&*source, &map("hf-to-fused")).unwrap();
        export(&fused, &plan(&model, &fused, 4), &to, 1 << 30).unwrap();
        let parts: Vec<Held> = (0..4).map(|rank| held(&files_of_rank(&to, rank))).collect();
        assert!(!parts[0].contains_key("model.layers.0.self_attn.q_proj.weight"));
        let whole = logits(&[held(std::slice::from_ref(&path))], &model);
        let found = logits(&parts, &model);
        let error = found
            .iter()
            .zip(&whole)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f64::max);
        assert!(error < 1e-9, "{error}");
        let read = opened(&to);
        let back = Mapped::new(&*read, &map("fused-to-hf")).unwrap();
        assert_eq!(differences(&*source, &back), [""; 0]);
    }
}

#[test]
fn a_rank_whose_files_are_missing_is_named() {
    let parent = TempDir::new().unwrap();
    let (path, to) = (
        parent.path().join("source.safetensors"),
        parent.path().join("to"),
    );
    let model = llama();
    model.write(&path);
    let source = opened(&path);
    export(&*source, &plan(&model, &*source, 4), &to, 3000).unwrap();
    assert!(files_of_rank(&to, 2).len() > 1);
    let sealed = to.join(".integrity");
    let seal = std::fs::read(&sealed).unwrap();
    for missing in files_of_rank(&to, 2) {
        let bytes = std::fs::read(&missing).unwrap();
        std::fs::remove_file(&missing).unwrap();
        for is_sealed in [true, false] {
            if is_sealed {
                std::fs::write(&sealed, &seal).unwrap()
            } else {
                std::fs::remove_file(&sealed).unwrap()
            }
            let error = refused(&to);
            let name = missing.file_name().unwrap().to_str().unwrap();
            assert!(
                matches!(&error, FileError::MissingFiles { files, .. } if files == &[name]),
                "{error}"
            );
        }
        std::fs::write(&missing, bytes).unwrap();
    }
    // Files of another number of ranks do not mix with these.
    let other = parent.path().join("other");
    export(&*source, &plan(&model, &*source, 2), &other, 1 << 30).unwrap();
    let first = &files_of_rank(&to, 0)[0];
    std::fs::copy(&files_of_rank(&other, 0)[0], first).unwrap();
    assert!(refused(&to).to_string().contains("model-rank-"));
}

#[test]
fn a_copy_that_is_damaged_on_one_rank_is_found_without_hashes() {
    let parent = TempDir::new().unwrap();
    let (path, to) = (
        parent.path().join("source.safetensors"),
        parent.path().join("to"),
    );
    let model = llama();
    model.write(&path);
    let source = opened(&path);
    export(&*source, &plan(&model, &*source, 4), &to, 1 << 30).unwrap();
    std::fs::remove_file(to.join(".integrity")).unwrap();
    assert!(
        verify(&*opened(&to), Level::Deep, VerifyOptions::default())
            .unwrap()
            .is_ok()
    );
    // The heads of keys on ranks 2 and 3 are the same: the file of rank 3 has a copy.
    let file = to.join("model-rank-3-part-0.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    let key = "model.layers.1.self_attn.k_proj.weight";
    let start = header[key]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[data + start + 5] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let damaged = opened(&to);
    let report = verify(&*damaged, Level::Deep, VerifyOptions::default()).unwrap();
    assert!(
        report
            .problems
            .iter()
            .any(|problem| problem.fqn.as_deref() == Some(key)),
        "{:?}",
        report.problems
    );
    let target = OutputFormat::SafetensorsFile;
    let error = convert(
        &*damaged,
        parent.path().join("again"),
        target,
        ConvertOptions::default(),
    )
    .unwrap_err();
    assert!(matches!(error, FileError::Differing { .. }), "{error}");
}

#[test]
fn a_plan_of_another_model_or_for_another_format_writes_nothing() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("source.safetensors");
    llama().write(&path);
    let source = opened(&path);
    let other_path = parent.path().join("other.safetensors");
    qwen2().write(&other_path);
    let other = plan(&qwen2(), &*opened(&other_path), 2);
    let to = parent.path().join("to");
    assert!(matches!(
        export(&*source, &other, &to, 1 << 30),
        Err(FileError::Encode { .. })
    ));
    let plan = plan(&llama(), &*source, 2);
    for target in [
        OutputFormat::SafetensorsFile,
        OutputFormat::SafetensorsShards { ranks: 2 },
        OutputFormat::Torch,
    ] {
        let options = ConvertOptions {
            tensor_parallel: Some(&plan),
            ..ConvertOptions::default()
        };
        assert!(
            matches!(
                convert(&*source, &to, target, options),
                Err(FileError::Encode { .. })
            ),
            "{target:?}"
        );
    }
    assert_eq!(
        std::fs::read_dir(parent.path()).unwrap().count(),
        2,
        "nothing beside the sources"
    );
}
