//! A GPT's checkpoint, through every layer: no tensor bytes move between ranks, and every bit comes back.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use candle_core::{Device, Tensor};
use fsdp::checkpoint::optimizer_template;
use fsdp::prelude::*;
use fsdp::state::flatten_state_dict;
use fsdp_cli::data::{Batches, Text, VOCAB};
use fsdp_cli::gpt::{Gpt, GptConfig};
use fsdp_dcp::reader::CheckpointReader;
use tempfile::TempDir;

const CONFIG: GptConfig = GptConfig { layers: 2, heads: 2, hidden: 32, seq: 16, vocab: VOCAB };
/// Views of the live values.
fn shared() -> StateDictOptions {
    StateDictOptions { share_storage: true, ..StateDictOptions::default() }
}

struct Run {
    model: FullyShardedDataParallel<Gpt>,
    optimizer: Optimizer,
}

impl Run {
    fn new(group: &ProcessGroup, seed: u64, use_orig_params: bool) -> Self {
        let config = FsdpConfig { seed, use_orig_params, ..FsdpConfig::default() };
        let model = FullyShardedDataParallel::new(group.clone(), config, |scope| Gpt::new(scope, &CONFIG)).unwrap();
        let algorithm = Algorithm::AdamW(AdamOptions { amsgrad: true, ..AdamOptions::adamw() });
        let optimizer = Optimizer::new(model.parameters(), algorithm).unwrap();
        Run { model, optimizer }
    }

    fn step(&mut self, step: u64) {
        let group = self.model.group();
        let batches = Batches { batch: 4, seq: CONFIG.seq, ranks: group.world_size(), accumulation: 1 };
        let (tokens, targets) = batches.batch(&Text::builtin(), step, group.rank(), 0, &Device::Cpu).unwrap();
        let loss = self.model.forward(|gpt| gpt.loss(&tokens, &targets)).unwrap();
        self.model.backward(&loss).unwrap();
        self.optimizer.step().unwrap();
        self.model.parameters().zero_grad();
    }

    fn state(&self, options: &StateDictOptions) -> StateDict {
        let (model, optim) = get_state_dict(self.model.parameters(), &[&self.optimizer], options).unwrap();
        [("model", model.into()), ("optim", optim.into())].into_iter().collect()
    }

    /// Every value of the whole state, by flat key, floats as bits.
    fn bits(&self) -> Vec<(String, String)> {
        let full = self.state(&StateDictOptions { full_state_dict: true, ..StateDictOptions::default() });
        let value = |(key, value): (String, StateValue)| match value {
            StateValue::Tensor(tensor) => (key, format!("{:?} {:?}", tensor.dims(), bits(&tensor))),
            other => (key, format!("{other:?}")),
        };
        let mut values: Vec<(String, String)> =
            flatten_state_dict(&full).unwrap().values.into_iter().map(value).collect();
        values.sort();
        values
    }

    fn load(&mut self, path: &Path) {
        let mut state = self.state(&shared());
        state.insert(
            "optim",
            optimizer_template(&CheckpointReader::open(path).unwrap(), &["optim"], &[&self.optimizer]).unwrap(),
        );
        let report = load(path, &mut state, self.model.group(), &LoadOptions::default()).unwrap();
        assert!(report.is_clean(), "{report:?}");
        let (model, optim) = (state.dict("model").unwrap(), state.dict("optim").unwrap());
        let parameters = self.model.parameters().clone();
        set_state_dict(&parameters, &mut [&mut self.optimizer], model, optim, &StateDictOptions::default()).unwrap();
    }
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn every_bit_comes_back_at_any_number_of_ranks_and_no_tensor_bytes_move_in_a_save() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("step-00000003");
    let saved = run_local(4, |group| {
        let mut run = Run::new(&group, 0, true);
        (0..3).for_each(|step| run.step(step));
        let before = group.traffic();
        save(&path, &run.state(&shared()), &group, &SaveOptions::default()).unwrap();
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
                let traffic = group.traffic();
                run.load(&path);
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
