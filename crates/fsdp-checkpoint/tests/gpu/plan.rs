//! The first plan of a save asks no more of GPUs if there are more parameters.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module as _, linear};
use fsdp_checkpoint::{Checkpointer, CheckpointerOptions, TrainState};
use fsdp_comm::run_local;
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::{FullyShardedDataParallel, Optimizer, Unit};
use tracing::span::Id;
use tracing_subscriber::Registry;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

use crate::counts::{counts, demands};
use crate::{alone, on_gpu};

const WIDTH: usize = 4;

/// Demands on GPUs, of the process, and the waits of streams that a thread asked for.
type Demands = ([u64; 7], u64);

fn now() -> Demands {
    (demands(), counts().stream_waits)
}

/// Records the demands at the end of the span `plan`.
#[derive(Debug, Clone, Default)]
struct AtEndOfPlan(Arc<Mutex<Option<Demands>>>);

impl<S: tracing::Subscriber + for<'l> LookupSpan<'l>> Layer<S> for AtEndOfPlan {
    fn on_close(&self, id: Id, context: Context<'_, S>) {
        if context.span(&id).is_some_and(|span| span.name() == "plan") {
            self.0.lock().unwrap().get_or_insert_with(now);
        }
    }
}

/// Returns what the first save of a model asks of GPUs until it is planned, on rank 0.
fn demands_of_plan(layer_count: usize) -> Demands {
    let dir = tempfile::tempdir().unwrap();
    let found = run_local(2, |group| {
        let config = on_gpu();
        let model: FullyShardedDataParallel<Vec<Unit<Linear>>> =
            FullyShardedDataParallel::new(group.clone(), config, |scope| {
                (0..layer_count)
                    .map(|layer| {
                        scope
                            .pp(layer)
                            .unit(|scope| linear(WIDTH, WIDTH, scope.vb()))
                    })
                    .collect()
            })
            .unwrap();
        let algorithm = Algorithm::AdamW(AdamOptions::adamw());
        let mut optimizer = Optimizer::new(model.parameters(), algorithm).unwrap();
        let x = Tensor::ones((2, WIDTH), DType::F32, &Device::new_cuda(0).unwrap()).unwrap();
        let loss = model
            .forward(|layers| {
                let output = layers
                    .iter()
                    .try_fold(x.clone(), |x, layer| layer.forward(&x))?;
                output.sqr()?.mean_all()
            })
            .unwrap();
        model.backward(&loss).unwrap();
        optimizer.step().unwrap();
        assert_eq!(model.parameters().fqns().count(), 2 * layer_count);
        let run = TrainState::new(model, vec![optimizer]);
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let end = AtEndOfPlan::default();
        let subscriber = Registry::default().with(end.clone());
        // Until rank 0 has planned and says where to write, no rank writes.
        group.barrier().unwrap();
        let before = now();
        group.barrier().unwrap();
        tracing::subscriber::with_default(subscriber, || checkpointer.save(1, &run)).unwrap();
        let after = end.0.lock().unwrap().take().unwrap();
        difference(after, before)
    });
    found.unwrap()[0]
}

fn difference((after, waits_after): Demands, (before, waits_before): Demands) -> Demands {
    let mut counts = after;
    for (count, before) in counts.iter_mut().zip(before) {
        *count -= before;
    }
    (counts, waits_after - waits_before)
}

#[test]
fn the_first_plan_asks_the_gpu_for_nothing_more_with_more_parameters() {
    let _alone = alone();
    let few = demands_of_plan(2);
    let many = demands_of_plan(60);
    assert_eq!(few, many, "with 4 and with 120 parameters");
    let [kernels, memsets, allocations, _, up, down, host_waits] = many.0;
    assert_eq!(
        [kernels, memsets, allocations, up, down, host_waits],
        [0; 6],
        "a plan is made of names and shapes"
    );
}
