//! Decides whether a difference exceeds noise: a pure function of the rounds.

use crate::results::median;
use crate::rows::Better;

/// Converts a median of absolute deviations to a standard deviation, for normally distributed noise.
const SIGMA_OF_MAD: f64 = 1.4826;
/// Ratio of the standard errors of a median and a mean.
const MEDIAN_LOSS: f64 = 1.2533;
/// Standard errors that still count as noise: about one false alarm in 700 rows, before the second pass.
const ERRORS: f64 = 3.0;

/// One round of one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    /// Two measurements of the same binary.
    pub(crate) noise: (f64, f64),
    /// The judged binary.
    pub(crate) newer: f64,
    /// The reference binary.
    pub(crate) older: f64,
}

/// Result for a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Verdict {
    /// Median change for the worse, as a share: 0.1 is a tenth worse, negative is better.
    pub(crate) change: f64,
    /// The largest change that is attributed to noise.
    pub(crate) allowed: f64,
}

impl Verdict {
    /// Whether the change is a regression.
    pub(crate) fn is_worse(self) -> bool {
        self.change > self.allowed
    }
}

/// Judges a row. Values are compared within each round first, so that speed changes of the machine between rounds do not
/// matter. `None` without comparable rounds.
pub(crate) fn judge(rounds: &[Round], better: Better, margin: f64) -> Option<Verdict> {
    let logs = |of: &dyn Fn(&Round) -> (f64, f64)| -> Vec<f64> {
        rounds
            .iter()
            .map(of)
            .filter(|(over, under)| *over > 0.0 && *under > 0.0)
            .map(|(over, under)| (over / under).ln())
            .collect()
    };
    let changes = logs(&|round| match better {
        Better::Higher => (round.older, round.newer),
        Better::Lower => (round.newer, round.older),
    });
    let noise = logs(&|round| round.noise);
    let change = median(changes)?;
    // A constant difference between two processes of one binary comes from chance at their start, and is noise, too.
    let luck = median(noise.clone())?.abs();
    let deviation = SIGMA_OF_MAD * median(noise.iter().map(|log| log.abs()).collect())?;
    let error = MEDIAN_LOSS * deviation / (noise.len() as f64).sqrt();
    Some(Verdict {
        change: change.exp_m1(),
        allowed: (margin.ln_1p() + luck + ERRORS * error).exp_m1(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds in which the newer binary takes `factor` times as long, on a machine whose noise repeats.
    fn rounds(factor: f64, noise: f64) -> Vec<Round> {
        [1.0, -0.5, 0.2, -1.0, 0.6]
            .map(|swing| Round {
                noise: (100.0 * (1.0 + noise * swing), 100.0),
                newer: 100.0 * factor * (1.0 - noise * swing),
                older: 100.0,
            })
            .to_vec()
    }

    fn is_worse(rounds: &[Round], better: Better) -> bool {
        judge(rounds, better, 0.05).unwrap().is_worse()
    }

    #[test]
    fn only_a_slowdown_beyond_margin_and_noise_is_a_regression() {
        for (factor, noise, better, is_regression) in [
            (1.2, 0.02, Better::Lower, true),
            (1.2, 0.3, Better::Lower, false),
            (1.04, 0.0, Better::Lower, false),
            (1.06, 0.0, Better::Lower, true),
            (0.5, 0.02, Better::Lower, false),
            (0.5, 0.02, Better::Higher, true),
        ] {
            let told = is_worse(&rounds(factor, noise), better);
            assert_eq!(told, is_regression, "{factor} {noise} {better:?}");
        }
        assert_eq!(judge(&[], Better::Lower, 0.05), None);
    }

    #[test]
    fn machine_speed_between_rounds_does_not_matter() {
        let mut all = rounds(1.0, 0.01);
        for (round, pace) in all.iter_mut().zip([1.0, 3.0, 0.3, 2.0, 0.5]) {
            round.noise = (round.noise.0 * pace, round.noise.1 * pace);
            round.newer *= pace;
            round.older *= pace;
        }
        let verdict = judge(&all, Better::Lower, 0.05).unwrap();
        assert!(verdict.change.abs() < 0.01, "{verdict:?}");
    }

    #[test]
    fn noise_between_runs_of_one_binary_widens_the_margin() {
        let lucky = [Round {
            noise: (120.0, 100.0),
            newer: 115.0,
            older: 100.0,
        }; 5];
        assert!(!is_worse(&lucky, Better::Lower));
    }
}
