//! A GPT's checkpoint, through every layer: no tensor bytes move between ranks, and every bit comes
//! back.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{Device, Tensor};
use fsdp::checkpoint::{StateDictOptions, get_state_dict};
use fsdp::prelude::*;
use fsdp::state::flatten_state_dict;
use fsdp_cli::data::{Batches, Text, VOCAB};
use fsdp_cli::gpt::{Gpt, GptConfig};
use tempfile::TempDir;

const CONFIG: GptConfig = GptConfig {
    layers: 2,
    heads: 2,
    hidden: 32,
    seq: 16,
    vocab: VOCAB,
};

struct Run(TrainState<Gpt>);

impl Run {
    fn new(group: &ProcessGroup, seed: u64, use_orig_params: bool) -> Self {
        let config = FsdpConfig {
            seed,
            use_orig_params,
            ..FsdpConfig::default()
        };
        let model =
            FullyShardedDataParallel::new(group.clone(), config, |scope| Gpt::new(scope, &CONFIG))
                .unwrap();
        let algorithm = Algorithm::AdamW(AdamOptions {
            amsgrad: true,
            ..AdamOptions::adamw()
        });
        let optimizer = Optimizer::new(model.parameters(), algorithm).unwrap();
        Run(TrainState::new(model, vec![optimizer]))
    }

    fn step(&mut self, step: u64) {
        let TrainState {
            model, optimizers, ..
        } = &mut self.0;
        let group = model.group();
        let batches = Batches {
            batch: 4,
            seq: CONFIG.seq,
            ranks: group.world_size(),
            accumulation: 1,
        };
        let first = batches.rows_of(step);
        let (tokens, targets) = batches
            .batch(&Text::builtin(), first, (group.rank(), 0), &Device::Cpu)
            .unwrap();
        let loss = model.forward(|gpt| gpt.loss(&tokens, &targets)).unwrap();
        model.backward(&loss).unwrap();
        optimizers[0].step().unwrap();
        model.parameters().zero_grad();
    }

    /// Every value of the whole state, by flat key, floats as bits.
    fn bits(&self) -> Vec<(String, String)> {
        let options = StateDictOptions {
            full_state_dict: true,
            ..StateDictOptions::default()
        };
        let (model, optim) = get_state_dict(
            self.0.model.parameters(),
            &[&self.0.optimizers[0]],
            &options,
        )
        .unwrap();
        let full: StateDict = [("model", model.into()), ("optim", optim.into())]
            .into_iter()
            .collect();
        let value = |(key, value): (String, StateValue)| match value {
            StateValue::Tensor(tensor) => (key, format!("{:?} {:?}", tensor.dims(), bits(&tensor))),
            other => (key, format!("{other:?}")),
        };
        let mut values: Vec<(String, String)> = flatten_state_dict(&full)
            .unwrap()
            .values
            .into_iter()
            .map(value)
            .collect();
        values.sort();
        values
    }
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap()
        .into_iter()
        .map(f32::to_bits)
        .collect()
}

#[test]
fn every_bit_comes_back_at_any_number_of_ranks_and_no_tensor_bytes_move_in_a_save() {
    let dir = TempDir::new().unwrap();
    let saved = run_local(4, |group| {
        let mut run = Run::new(&group, 0, true);
        (0..3).for_each(|step| run.step(step));
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let before = group.traffic();
        checkpointer.save(3, &run.0).unwrap();
        assert_eq!(group.traffic().since(&before).tensor_bytes(), 0);
        run.bits()
    });
    let saved = saved.unwrap();
    assert!(saved[0].len() > 100 && saved.iter().all(|bits| *bits == saved[0]));
    for ranks in [1, 2, 3, 4, 5] {
        for use_orig_params in [true, false] {
            let loaded = run_local(ranks, |group| {
                // Another seed, and a step: all of it must be replaced.
                let mut run = Run::new(&group, 1, use_orig_params);
                if ranks != 3 && ranks != 5 {
                    run.step(7);
                }
                let mut checkpointer =
                    Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
                let traffic = group.traffic();
                let report = checkpointer.load(3, &mut run.0).unwrap();
                assert!(report.is_clean(), "{report:?}");
                assert_eq!(group.traffic().since(&traffic).tensor_bytes(), 0);
                run.bits()
            });
            for bits in loaded.unwrap() {
                for (loaded, saved) in bits.iter().zip(&saved[0]) {
                    assert_eq!(loaded, saved, "{ranks} ranks");
                }
                assert_eq!(bits.len(), saved[0].len());
            }
        }
    }
}
