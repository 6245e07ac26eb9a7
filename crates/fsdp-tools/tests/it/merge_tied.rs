//! Merges of models in which layers share a weight.

use std::path::Path;

use fsdp_formats::checkpoint::open;
use fsdp_layout::{ErrorKind, Failure as _, PlainValue, with_causes};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::merge::{Average, Lora, LoraConfig};

use crate::merge::{adapter, file, floats, tensor};

/// The ways in which PEFT saves a change of an embedding or of an output layer, for a table of
/// `[2, 1]` of that name. Each changes the weight.
fn changes_of(module: &str) -> Vec<(&'static str, Vec<(String, PlainValue)>)> {
    let key = |ending: &str| format!("base_model.model.{module}.{ending}");
    let whole = || tensor(&[2, 1], &[1.0, 2.0]);
    let embedding_a = || (key("lora_embedding_A"), tensor(&[1, 2], &[1.0, 2.0]));
    let embedding_b = || (key("lora_embedding_B"), tensor(&[1, 1], &[1.0]));
    vec![
        ("whole", vec![(key("weight"), whole())]),
        ("update", vec![embedding_a(), embedding_b()]),
        (
            "update and its base",
            vec![
                (key("base_layer.weight"), tensor(&[2, 1], &[0.0; 2])),
                embedding_a(),
                embedding_b(),
            ],
        ),
        (
            "update of a layer",
            vec![
                (key("lora_A.weight"), tensor(&[1, 1], &[1.0])),
                (key("lora_B.weight"), tensor(&[2, 1], &[1.0, 2.0])),
            ],
        ),
    ]
}

/// Merges an adapter into a base of one file with this configuration, in a directory of its own.
/// Returns the merged tables by name, or the text of the error.
fn merge_tables(
    directory: &Path,
    model: Option<&str>,
    config: &str,
    tables: &[&str],
    changes: &[(String, PlainValue)],
) -> Result<Vec<Vec<f32>>, String> {
    std::fs::create_dir(directory).unwrap();
    if let Some(model) = model {
        std::fs::write(directory.join("config.json"), model).unwrap();
    }
    let items = tables.iter().map(|key| (*key, tensor(&[2, 1], &[0.0; 2])));
    let base = file(&directory.join("base.pt"), items.collect());
    let path = directory.join("adapter");
    let changes = changes
        .iter()
        .map(|(key, value)| (key.as_str(), value.clone()));
    let adapter = adapter(&path, config, changes.collect());
    let merged = LoraConfig::read(path).and_then(|config| Lora::new(&*base, &*adapter, &config));
    merged
        .map(|merged| tables.iter().map(|key| floats(&merged, key)).collect())
        .map_err(|error| with_causes(&error))
}

const PLAIN: &str = r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#;

#[test]
fn no_change_of_a_weight_that_layers_share_reaches_only_one_of_them() {
    let parent = tempfile::tempdir().unwrap();
    let (tied, untied) = (
        r#"{"tie_word_embeddings": true}"#,
        r#"{"tie_word_embeddings": false}"#,
    );
    let causal = r#"{"architectures": ["LlamaForCausalLM"]}"#;
    let masked = r#"{"architectures": ["BertForMaskedLM"]}"#;
    let classifier = r#"{"architectures": ["XLMRobertaForSequenceClassification"], "tie_word_embeddings": true}"#;
    let of_text = r#"{"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"vocab_size": 2}}"#;
    for (name, model, table, is_refused) in [
        ("tied", Some(tied), "model.embed_tokens", true),
        ("unknown", None, "model.embed_tokens", true),
        ("causal", Some(causal), "transformer.wte", true),
        (
            "masked",
            Some(masked),
            "bert.embeddings.word_embeddings",
            true,
        ),
        (
            "classifier",
            Some(classifier),
            "roberta.embeddings.word_embeddings",
            false,
        ),
        ("untied", Some(untied), "model.embed_tokens", false),
        ("by its rows", Some(of_text), "language_model.words", true),
        ("the output layer only", Some(tied), "lm_head", true),
        ("encoder and decoder", Some(untied), "shared", true),
        ("positions", Some(tied), "transformer.wpe", false),
    ] {
        for (way, changes) in changes_of(table) {
            let directory = parent.path().join(format!("{name}, {way}"));
            let tables = [format!("{table}.weight")];
            let tables = tables.each_ref().map(String::as_str);
            let found = merge_tables(&directory, model, PLAIN, &tables, &changes);
            if is_refused {
                let text = found.unwrap_err();
                assert!(
                    text.contains(tables[0]) && text.contains("tie_word_embeddings"),
                    "{name}, {way}: {text}"
                );
            } else {
                assert_eq!(found, Ok(vec![vec![1.0, 2.0]]), "{name}, {way}");
            }
        }
    }
}

#[test]
fn a_change_of_a_tied_output_layer_that_the_base_has_under_another_name_says_so() {
    let parent = tempfile::tempdir().unwrap();
    let model = Some(r#"{"tie_word_embeddings": true}"#);
    for (way, changes) in changes_of("lm_head") {
        let tables = ["model.embed_tokens.weight"];
        let text =
            merge_tables(&parent.path().join(way), model, PLAIN, &tables, &changes).unwrap_err();
        assert!(
            text.contains("lm_head.weight") && text.contains(tables[0]),
            "{way}: {text}"
        );
    }
}

/// PEFT saves it once for each layer with `ensure_weight_tying`.
#[test]
fn a_change_of_both_layers_of_a_tied_weight_is_made_once() {
    let parent = tempfile::tempdir().unwrap();
    let model = Some(r#"{"tie_word_embeddings": true}"#);
    let tying = r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "ensure_weight_tying": true}"#;
    let tables = ["model.embed_tokens.weight"];
    let ways = changes_of("model.embed_tokens");
    let [(_, whole), (_, update), ..] = &ways[..] else {
        panic!("{ways:?}")
    };
    let head = changes_of("lm_head");
    let (whole_of_head, update_of_head) = (&head[0].1, &head[3].1);
    // The update of the output layer has another factor B.
    let mut other_update = update_of_head.clone();
    other_update[1].1 = tensor(&[2, 1], &[1.0, 3.0]);
    for (name, changes, is_refused) in [
        ("whole", whole.clone(), false),
        ("whole twice", [&whole[..], whole_of_head].concat(), false),
        (
            "update twice",
            [&update[..], update_of_head].concat(),
            false,
        ),
        (
            "one name, but not that of the base",
            whole_of_head.clone(),
            true,
        ),
        (
            "another update",
            [&update[..], &other_update].concat(),
            true,
        ),
    ] {
        let found = merge_tables(&parent.path().join(name), model, tying, &tables, &changes);
        assert_eq!(
            found.as_ref().ok(),
            (!is_refused).then(|| vec![vec![1.0, 2.0]]).as_ref(),
            "{name}: {found:?}"
        );
    }
}

#[test]
fn two_names_of_one_weight_do_not_get_different_values() {
    let parent = tempfile::tempdir().unwrap();
    let tables = ["model.embed_tokens.weight", "lm_head.weight"];
    let (tied, untied, silent) = (
        r#"{"tie_word_embeddings": true}"#,
        r#"{"tie_word_embeddings": false}"#,
        r#"{"model_type": "gpt2"}"#,
    );
    for (name, model, is_refused) in [
        ("tied", Some(tied), true),
        ("silent", Some(silent), true),
        ("untied", Some(untied), false),
        ("none", None, false),
    ] {
        for table in ["model.embed_tokens", "lm_head"] {
            for (way, changes) in changes_of(table) {
                let directory = parent.path().join(format!("{name}, {table}, {way}"));
                let found = merge_tables(&directory, model, PLAIN, &tables, &changes);
                let texts = found.as_ref().err();
                assert_eq!(
                    texts.map(|text| text.contains("tie_word_embeddings")),
                    is_refused.then_some(true),
                    "{name}, {table}, {way}: {found:?}"
                );
            }
        }
        // The same change of both is one of the weight.
        let both = [
            changes_of("model.embed_tokens")[0].1.clone(),
            changes_of("lm_head")[0].1.clone(),
        ]
        .concat();
        let directory = parent.path().join(format!("{name}, both"));
        let found = merge_tables(&directory, model, PLAIN, &tables, &both);
        assert_eq!(found, Ok(vec![vec![1.0, 2.0]; 2]), "{name}");
    }
}

#[test]
fn an_average_of_a_tied_model_and_one_that_is_not_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let make = |name: &str, config: &str, head: f32| {
        let directory = parent.path().join(name);
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("config.json"), config).unwrap();
        let items = vec![
            ("model.embed_tokens.weight", tensor(&[1, 1], &[1.0])),
            ("lm_head.weight", tensor(&[1, 1], &[head])),
        ];
        file(&directory.join("model.pt"), items)
    };
    let tied = make("tied", r#"{"tie_word_embeddings": true}"#, 1.0);
    let untied = make("untied", r#"{"tie_word_embeddings": false}"#, 2.0);
    let error = Average::new(vec![&*tied, &*untied], &[]).unwrap_err();
    assert!(error.to_string().contains("tie_word_embeddings"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(Average::new(vec![&*untied, &*tied], &[]).is_ok());
    assert!(Average::new(vec![&*tied, &*tied], &[]).is_ok());
}

#[test]
fn layers_of_blocks_with_as_many_rows_as_there_are_tokens_are_no_tables() {
    let parent = tempfile::tempdir().unwrap();
    let make = |name: &str, number: f32| {
        let directory = parent.path().join(name);
        std::fs::create_dir(&directory).unwrap();
        let config = r#"{"model_type": "gpt2", "vocab_size": 4, "tie_word_embeddings": true}"#;
        std::fs::write(directory.join("config.json"), config).unwrap();
        let source = file(
            &parent.path().join(format!("{name}.pt")),
            vec![
                ("transformer.wte.weight", tensor(&[4, 1], &[number; 4])),
                (
                    "transformer.h.0.mlp.c_proj.weight",
                    tensor(&[4, 1], &[number + 1.0; 4]),
                ),
                (
                    "transformer.h.1.mlp.c_proj.weight",
                    tensor(&[4, 1], &[number + 2.0; 4]),
                ),
            ],
        );
        let to = directory.join("model.safetensors");
        let target = OutputFormat::SafetensorsFile;
        convert(&*source, &to, target, ConvertOptions::default()).unwrap();
        open(&directory, Default::default()).unwrap()
    };
    let (first, second) = (make("a", 1.0), make("b", 3.0));
    let average = Average::new(vec![&*first, &*second], &[]).unwrap();
    assert_eq!(
        floats(&average, "transformer.h.1.mlp.c_proj.weight"),
        [4.0; 4]
    );
}

#[test]
fn a_configuration_that_is_copied_must_be_true_of_what_is_merged() {
    let parent = tempfile::tempdir().unwrap();
    let tables = ["model.embed_tokens.weight", "lm_head.weight"];
    let items = tables.map(|key| (key, tensor(&[2, 1], &[0.0; 2])));
    let base = file(&parent.path().join("base.pt"), items.to_vec());
    let (_, change) = &changes_of("lm_head")[0];
    let change = change
        .iter()
        .map(|(key, value)| (key.as_str(), value.clone()));
    let path = parent.path().join("adapter");
    let adapter = adapter(&path, PLAIN, change.collect());
    let merged = Lora::new(&*base, &*adapter, &LoraConfig::read(path).unwrap()).unwrap();
    for (config, is_true) in [
        (r#"{"tie_word_embeddings": true}"#, false),
        (r#"{"text_config": {"tie_word_embeddings": true}}"#, false),
        (r#"{"tie_word_embeddings": false}"#, true),
        (
            r#"{"tie_word_embeddings": true, "text_config": {"tie_word_embeddings": false}}"#,
            true,
        ),
    ] {
        std::fs::write(parent.path().join("config.json"), config).unwrap();
        let checked = merged.check_configuration(&parent.path().into());
        assert_eq!(checked.is_ok(), is_true, "{config}: {checked:?}");
    }
}
