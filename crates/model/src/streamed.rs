//! A model whose layers are in memory one at a time: for a machine that holds one layer and many sequences.
//!
//! Sequences go through a layer one after the other, then the next layer takes its place. Between two layers a sequence
//! can be saved and taken up again later.

use checkpoint::{Config, Role};
use ops::{Backend, Host, Taps, blocks::OpenGroup};

use crate::{
    Input, Model, Output, Result, Ropes, Rows, State, Walk, Weights,
    engram::Hasher,
    head,
    layer::Layer,
    load::{Loader, layer, mat},
};

/// A model with at most one layer in memory.
pub struct Streamed<B: Backend> {
    model: Model<B>,
    layer: Option<(usize, Layer<B>)>,
}

/// What a sequence between two layers consists of, by name: streams, input weights, choices, entries of the KV sources
/// and their open groups.
pub type Saved = Vec<(String, Host)>;

impl<B: Backend> Streamed<B> {
    /// Embedding and head of `weights`, and no layer yet; without draft stages. States of such a model are not kept
    /// beyond it: it has no identity.
    ///
    /// # Errors
    /// What `weights` or the device reports, or a token map of the wrong size.
    pub fn new(backend: B, config: Config, weights: &dyn Weights, token_map: Vec<u32>) -> Result<Self> {
        let embed = mat(&Loader::new(&backend, weights, ""), "embed")?;
        let head = head::load(&backend, weights, &config)?;
        let (ropes, hasher) = (Ropes::new(&config), Hasher::new(&config, token_map)?);
        let layers = Vec::new();
        let model =
            Model { backend, config, embed, layers, head, ropes, hasher, draft: None, identity: [0; 32] };
        Ok(Self { model, layer: None })
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        self.model.backend()
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        self.model.config()
    }

    /// Puts layer `l` in the place of the one before, which is dropped first.
    ///
    /// # Errors
    /// What `weights` or the device reports.
    pub fn load(&mut self, weights: &dyn Weights, l: usize) -> Result<()> {
        self.layer = None;
        self.layer = Some((l, layer(&self.model.backend, weights, &self.model.config, l)?));
        Ok(())
    }

    /// An empty state for at most `context` tokens.
    ///
    /// # Errors
    /// A context beyond the model's positions, or too little memory.
    pub fn new_state(&self, context: usize) -> Result<State<B>> {
        self.model.new_state(context)
    }

    /// Embeds the tokens of a step and counts them as taken, so that the next step of the sequence can be started
    /// before this one has gone through any layer.
    ///
    /// # Errors
    /// Those of [`Model::forward`].
    pub fn start(&self, state: &mut State<B>, input: Input<'_>) -> Result<Walk<B>> {
        let walk = self.model.start(state, input)?;
        state.len = walk.end;
        Ok(walk)
    }

    /// Runs the layer in memory on `walk`, whichever layer came before. Steps of one sequence go in their order.
    ///
    /// # Errors
    /// A device failure; the state is then unusable.
    ///
    /// # Panics
    /// Where no layer is loaded.
    pub fn advance(
        &self,
        walk: &mut Walk<B>,
        state: &mut State<B>,
        taps: &mut Taps<'_, B::Buf>,
    ) -> Result<()> {
        let (l, layer) = self.layer.as_ref().expect("a layer is loaded before a walk advances");
        self.model.take(layer, *l, walk, state, taps)
    }

    /// The head for every row of a walk that all layers have taken.
    ///
    /// # Errors
    /// A device failure.
    pub fn finish(&self, walk: Walk<B>, state: &mut State<B>) -> Result<Output<B>> {
        let out = self.model.finish(walk, state, Rows::All, &mut Taps::off())?;
        Ok(out.expect("every row was asked for"))
    }

    /// A sequence between two layers. Window rows belong to layers that have run, so they are left out.
    ///
    /// # Errors
    /// A device failure.
    pub fn save(&self, walk: &Walk<B>, state: &State<B>) -> Result<Saved> {
        let b = self.backend();
        let mut parts =
            vec![("streams".to_owned(), b.read(&walk.streams)?), ("pre".to_owned(), b.read(&walk.pre)?)];
        for (l, chosen) in &walk.selection.chosen {
            parts.push((format!("chosen.{l}"), b.read(chosen)?));
        }
        if let Some(mask) = &walk.selection.candidates {
            parts.push(("candidates".to_owned(), b.read(mask)?));
        }
        for (l, global) in state.globals.iter().enumerate() {
            let Some(global) = global else { continue };
            parts.push((format!("kv.{l}"), b.read(&global.kv)?));
            parts.push((format!("keys.{l}"), b.read(&global.keys)?));
            if let Some(open) = &global.open {
                parts.push((format!("open_kv.{l}"), b.read(&open.kv)?));
                parts.push((format!("open_score.{l}"), b.read(&open.score)?));
            }
        }
        Ok(parts)
    }

    /// Puts a walk that was just started behind layer `layer - 1`, as it was saved. `false` where a part is missing or
    /// has another shape; walk and state are then unusable.
    ///
    /// # Errors
    /// A device failure.
    pub fn restore(
        &self,
        layer: usize,
        walk: &mut Walk<B>,
        state: &mut State<B>,
        parts: &[(String, Host)],
    ) -> Result<bool> {
        let (b, c) = (self.backend(), self.config());
        let part = |name: &str| parts.iter().find(|(n, _)| n == name).map(|(_, host)| host);
        let like = |name: &str, shape: Vec<usize>| part(name).filter(|host| host.shape() == shape);
        let (Some(streams), Some(pre)) =
            (like("streams", b.shape(&walk.streams)), like("pre", b.shape(&walk.pre)))
        else {
            return Ok(false);
        };
        (walk.streams, walk.pre) = (b.upload(streams)?, b.upload(pre)?);
        for l in 0..c.num_hidden_layers {
            if let Some(chosen) = part(&format!("chosen.{l}")) {
                walk.selection.chosen.push((l, b.upload(chosen)?));
            }
            if c.layer(l).role != Role::Full || l >= layer {
                continue;
            }
            let Some(global) = &mut state.globals[l] else { return Ok(false) };
            let kv = like(&format!("kv.{l}"), b.shape(&global.kv));
            let keys = like(&format!("keys.{l}"), b.shape(&global.keys));
            let (Some(kv), Some(keys)) = (kv, keys) else { return Ok(false) };
            (global.kv, global.keys) = (b.upload(kv)?, b.upload(keys)?);
            let open = [part(&format!("open_kv.{l}")), part(&format!("open_score.{l}"))];
            if let [Some(kv), Some(score)] = open {
                global.open = Some(OpenGroup { kv: b.upload(kv)?, score: b.upload(score)? });
            }
        }
        if let Some(mask) = part("candidates") {
            walk.selection.candidates = Some(b.upload(mask)?);
        }
        walk.layer = layer;
        Ok(true)
    }
}
