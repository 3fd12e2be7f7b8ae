//! How many tokens to draft: the measured time of steps against the chance that drafts are right.
//!
//! Which drafts are asked for changes the time of an answer only, never a token of it: the target's own token is drawn at
//! every position with that position's number, and a draft is kept only if it equals it.

use std::{collections::VecDeque, fmt, str::FromStr, time::Duration};

use serde::Serialize;

use crate::{Error, Result};

/// Times that a median is taken of.
const SAMPLES: usize = 9;
/// Plain steps measured before drafts are tried.
const WARM_UP: usize = 3;
/// Rounds after which drafts that lose are paused; half as many are enough where they lose [`CLEARLY`].
const TRIAL: usize = 4;
const CLEARLY: f64 = 1.3;
/// Weight of the rounds so far when one is added: about ten count.
const MEMORY: f64 = 0.9;
/// Rounds after which a plain step is measured again.
const REFRESH: usize = 48;
/// Plain steps of the first pause; each further one is twice as long.
const PAUSE: usize = 96;
const LONGEST_PAUSE: usize = 1024;

/// Whether tokens are drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drafts {
    /// Never.
    Off,
    /// As many as pay, none while they do not; a model without draft stages does without.
    #[default]
    Auto,
    /// As [`Drafts::Auto`]; a model without draft stages is refused.
    On,
    /// This many in every round.
    Fixed(usize),
}

impl FromStr for Drafts {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        match (s, s.parse()) {
            ("on", _) => Ok(Drafts::On),
            ("off", _) | (_, Ok(0)) => Ok(Drafts::Off),
            (_, Ok(n)) => Ok(Drafts::Fixed(n)),
            _ => Err(format!("'{s}': on, off or a number is needed")),
        }
    }
}

impl fmt::Display for Drafts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Drafts::Off => f.write_str("off"),
            Drafts::Auto | Drafts::On => f.write_str("on"),
            Drafts::Fixed(n) => write!(f, "{n}"),
        }
    }
}

/// Figures of drafting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DraftStats {
    /// Steps that verified drafts.
    pub rounds: u64,
    /// Drafts verified.
    pub drafted: u64,
    /// Drafts that were right.
    pub accepted: u64,
    /// Steps of one token.
    pub plain: u64,
    /// Times that drafting was paused because it lost time.
    pub pauses: u64,
}

impl DraftStats {
    /// What was added since `before`.
    pub fn since(&self, before: &DraftStats) -> DraftStats {
        DraftStats {
            rounds: self.rounds - before.rounds,
            drafted: self.drafted - before.drafted,
            accepted: self.accepted - before.accepted,
            plain: self.plain - before.plain,
            pauses: self.pauses - before.pauses,
        }
    }
}

/// Makes drafts in place of the model's own stages.
pub trait Drafter: Send {
    /// At most `count` tokens that may follow `ids`.
    fn draft(&mut self, ids: &[u32], count: usize) -> Vec<u32>;
}

/// Median of the last times.
#[derive(Clone, Debug, Default)]
struct Times(VecDeque<f64>);

impl Times {
    fn add(&mut self, time: Duration) {
        if self.0.len() == SAMPLES {
            self.0.pop_front();
        }
        self.0.push_back(time.as_secs_f64());
    }

    fn median(&self) -> Option<f64> {
        let mut sorted: Vec<f64> = self.0.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }
}

/// Decides how many tokens to draft. Lives as long as its session, so that what was measured in one answer serves the
/// next.
pub struct Speculation {
    drafts: Drafts,
    block: usize,
    drafter: Option<Box<dyn Drafter>>,
    /// Time of a step by its rows, from 1.
    steps: Vec<Times>,
    drafting: Times,
    /// Drafts right of all verified, and what their confidence promised.
    right: f64,
    promised: f64,
    /// Rounds since the last pause; weighted seconds of plain steps for their tokens, and of the rounds themselves.
    trial: (usize, f64, f64),
    /// Rounds since a plain step was measured.
    since_plain: usize,
    /// Plain steps left of a pause, and the length of the next.
    pause: (usize, usize),
    stats: DraftStats,
}

impl Speculation {
    /// For a model that drafts `block` tokens at most, 0 if it has no draft stages.
    ///
    /// # Errors
    /// More drafts than the model makes, or drafts of a model without stages.
    pub fn new(drafts: Drafts, block: usize) -> Result<Self> {
        match drafts {
            Drafts::On | Drafts::Fixed(_) if block == 0 => {
                return Err(Error::Refused(format!(
                    "--drafts {drafts} is refused: the checkpoint has no DSpark stages (mtp.*); use --drafts off"
                )));
            }
            Drafts::Fixed(n) if n > block => {
                return Err(Error::Refused(format!(
                    "--drafts {n} is refused: the model drafts at most {block} tokens (dspark_block_size)"
                )));
            }
            _ => {}
        }
        Ok(Self {
            drafts: if block == 0 { Drafts::Off } else { drafts },
            block,
            drafter: None,
            steps: vec![Times::default(); block + 2],
            drafting: Times::default(),
            right: 1.0,
            promised: 1.0,
            trial: (0, 0.0, 0.0),
            since_plain: 0,
            pause: (0, PAUSE),
            stats: DraftStats::default(),
        })
    }

    /// The same choice for another session, which measures for itself; a replaced drafter is not carried over.
    pub(crate) fn again(&self) -> Self {
        let fresh = Self::new(self.drafts, self.block);
        fresh.unwrap_or_else(|_| unreachable!("the choice was checked before"))
    }

    /// Lets `drafter` draft in place of the model's stages.
    pub fn set_drafter(&mut self, drafter: Box<dyn Drafter>) {
        self.drafter = Some(drafter);
    }

    /// Takes the drafter for one round.
    pub(crate) fn take_drafter(&mut self) -> Option<Box<dyn Drafter>> {
        self.drafter.take()
    }

    /// Figures so far.
    pub fn stats(&self) -> DraftStats {
        self.stats
    }

    /// How many tokens to draft now, at most `most`; 0 for a plain step.
    pub(crate) fn ask(&self, most: usize) -> usize {
        match self.drafts {
            Drafts::Off => 0,
            Drafts::Fixed(n) => n.min(most),
            Drafts::Auto | Drafts::On => {
                let measure = self.steps[1].0.len() < WARM_UP || self.since_plain >= REFRESH;
                if measure || self.pause.0 > 0 { 0 } else { self.block.min(most) }
            }
        }
    }

    /// How many of the drafts with these confidences to verify: those that promise most tokens a second. Empty
    /// confidences leave the choice to the caller.
    pub(crate) fn choose(&self, confidence: &[f32]) -> usize {
        if let Drafts::Fixed(_) = self.drafts {
            return confidence.len();
        }
        let drafting = self.drafting.median().unwrap_or(0.0);
        let rate = |tokens: f64, rows: usize| tokens / (drafting + self.time(rows));
        let (mut best, mut choice) = (rate(1.0, 1), 0);
        let (mut tokens, mut survival) = (1.0, 1.0);
        for (i, c) in confidence.iter().enumerate() {
            survival *= (self.right / self.promised * sigmoid(*c)).min(1.0);
            tokens += survival;
            let r = rate(tokens, i + 2);
            // What is hardly better is not worth a row.
            if r > 1.001 * best {
                (best, choice) = (r, i + 1);
            }
        }
        choice
    }

    /// Estimated seconds of a step of `rows` rows.
    fn time(&self, rows: usize) -> f64 {
        let known = |r: &usize| self.steps[*r].median().map(|t| (*r, t));
        let below = (1..=rows).rev().find_map(|r| known(&r));
        let above = (rows..self.steps.len()).find_map(|r| known(&r));
        match (below, above) {
            (Some((a, s)), Some((b, t))) if b > a => s + (t - s) * (rows - a) as f64 / (b - a) as f64,
            (Some((_, s)), _) => s,
            (None, Some((_, t))) => t,
            (None, None) => 0.0,
        }
    }

    /// A plain step took so long.
    pub(crate) fn plain(&mut self, time: Duration) {
        self.stats.plain += 1;
        self.since_plain = 0;
        self.pause.0 = self.pause.0.saturating_sub(1);
        self.steps[1].add(time);
    }

    /// A round took so long to draft and to verify, and gave `accepted` right drafts of those with `confidence`.
    pub(crate) fn round(
        &mut self,
        drafting: Duration,
        verify: Duration,
        confidence: &[f32],
        accepted: usize,
    ) {
        let drafted = confidence.len();
        self.stats.rounds += 1;
        self.stats.drafted += drafted as u64;
        self.stats.accepted += accepted as u64;
        self.since_plain += 1;
        self.drafting.add(drafting);
        self.steps[drafted + 1].add(verify);
        // Only drafts up to the first wrong one are put to the test.
        let tested = &confidence[..drafted.min(accepted + 1)];
        let (right, promised) = tested
            .iter()
            .enumerate()
            .fold((0.0, 0.0), |(r, p), (i, c)| (r + f64::from(u8::from(i < accepted)), p + sigmoid(*c)));
        (self.right, self.promised) = (0.98 * self.right + right, 0.98 * self.promised + promised);
        self.judge(drafted + 1, accepted + 1);
    }

    /// Pauses drafting when its rounds took longer than plain steps for as many tokens. Medians stand for the times, as
    /// one disturbed step must not decide.
    fn judge(&mut self, rows: usize, tokens: usize) {
        if !matches!(self.drafts, Drafts::Auto | Drafts::On) {
            return;
        }
        let spent = self.drafting.median().unwrap_or(0.0) + self.time(rows);
        let (rounds, plain, drafted) = self.trial;
        let (plain, drafted) = (MEMORY * plain + tokens as f64 * self.time(1), MEMORY * drafted + spent);
        self.trial = (rounds + 1, plain, drafted);
        let loses = match rounds + 1 {
            n if n >= TRIAL => drafted > plain,
            n => n >= TRIAL / 2 && drafted > CLEARLY * plain,
        };
        if loses {
            self.stats.pauses += 1;
            self.pause = (self.pause.1, (2 * self.pause.1).min(LONGEST_PAUSE));
            self.trial = (0, 0.0, 0.0);
        } else if rounds >= 2 * TRIAL {
            self.pause.1 = PAUSE;
        }
    }
}

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a step of r rows takes `step(r)` µs and a draft `draft` µs; drafts are right with chance `p`.
    struct Machine {
        step: fn(usize) -> u64,
        draft: u64,
        p: f64,
        random: u64,
    }

    impl Machine {
        fn right(&mut self) -> bool {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((self.random >> 11) as f64 / (1u64 << 53) as f64) < self.p
        }

        /// Microseconds for `tokens` tokens, every 50th time three times as long, as on a shared machine.
        fn run(&mut self, drafts: Drafts, tokens: usize) -> (f64, DraftStats) {
            let mut s = Speculation::new(drafts, 4).unwrap();
            // What the stages say of themselves: the truth, or nothing that helps.
            let confidence = [(self.p / (1.0 - self.p)).ln() as f32; 4];
            let (mut done, mut total, mut n) = (0, 0, 0);
            while done < tokens {
                n += 1;
                let slow = if n % 50 == 0 { 3 } else { 1 };
                let ask = s.ask(4);
                let choice = if ask == 0 { 0 } else { s.choose(&confidence[..ask]) };
                let drafting = if ask == 0 { 0 } else { self.draft };
                let verify = (self.step)(choice + 1) * slow;
                total += drafting + verify;
                let accepted = (0..choice).take_while(|_| self.right()).count();
                if ask == 0 {
                    s.plain(Duration::from_micros(verify));
                } else {
                    let (d, v) = (Duration::from_micros(drafting), Duration::from_micros(verify));
                    s.round(d, v, &confidence[..choice], accepted);
                }
                done += accepted + 1;
            }
            (total as f64, s.stats())
        }
    }

    #[test]
    fn drafts_that_pay_are_used() {
        let mut m = Machine { step: |r| 1000 + 50 * (r as u64 - 1), draft: 300, p: 0.9, random: 1 };
        let (off, _) = m.run(Drafts::Off, 1000);
        let (auto, stats) = m.run(Drafts::Auto, 1000);
        assert!(auto < 0.5 * off, "{auto} against {off}: {stats:?}");
        assert!(stats.plain < 20, "{stats:?}");
    }

    #[test]
    fn drafts_that_lose_are_paused() {
        for (draft, p) in [(300, 0.05), (900, 0.3), (2000, 0.9)] {
            // Every row costs as much as a step.
            let mut m = Machine { step: |r| 1000 * r as u64, draft, p, random: 1 };
            let (off, _) = m.run(Drafts::Off, 512);
            let (auto, stats) = m.run(Drafts::Auto, 512);
            assert!(off > 0.95 * auto, "{off} against {auto}: {stats:?}");
            assert!(stats.pauses > 0, "{stats:?}");
        }
    }

    #[test]
    fn fewer_drafts_are_verified_where_they_cost() {
        let s = |step: fn(usize) -> u64| {
            let mut s = Speculation::new(Drafts::Auto, 4).unwrap();
            s.plain(Duration::from_micros(step(1)));
            for k in 1..=4 {
                let confidence = vec![3.0; k];
                s.round(Duration::from_micros(100), Duration::from_micros(step(k + 1)), &confidence, k);
            }
            s
        };
        let flat = s(|_| 1000);
        assert_eq!(flat.choose(&[3.0, 3.0, 3.0, 3.0]), 4);
        assert_eq!(flat.choose(&[3.0, 3.0, -30.0, 3.0]), 2, "nothing behind a hopeless draft is of use");
        let steep = s(|r| 1000 * r as u64);
        assert_eq!(steep.choose(&[0.0, 0.0, 0.0, 0.0]), 0);
    }

    #[test]
    fn a_fixed_number_is_kept() {
        let mut m = Machine { step: |r| 1000 * r as u64, draft: 5000, p: 0.01, random: 1 };
        let (_, stats) = m.run(Drafts::Fixed(3), 100);
        assert_eq!((stats.drafted, stats.plain, stats.pauses), (3 * stats.rounds, 0, 0));
    }

    #[test]
    fn what_the_model_cannot_draft_is_refused() {
        assert!(matches!(Speculation::new(Drafts::Fixed(5), 4), Err(Error::Refused(_))));
        assert!(matches!(Speculation::new(Drafts::On, 0), Err(Error::Refused(_))));
        assert_eq!(Speculation::new(Drafts::Auto, 0).unwrap().ask(9), 0);
    }

    #[test]
    fn the_option_is_read() {
        let read = |s: &str| s.parse::<Drafts>();
        assert_eq!(read("on"), Ok(Drafts::On));
        assert_eq!((read("off"), read("0")), (Ok(Drafts::Off), Ok(Drafts::Off)));
        assert_eq!(read("3"), Ok(Drafts::Fixed(3)));
        assert!(read("-1").is_err() && read("yes").is_err());
    }
}
