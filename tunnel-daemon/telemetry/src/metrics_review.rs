//! Series of token reviews.

use std::time::Duration;

use adit_kube::reviewer::{ReviewEvents, ReviewResult};
use prometheus::{Histogram, IntGauge};

use crate::families::{Counters, Registrar};
use crate::labels::TokenReview;

/// Upper bounds in seconds: an API server answers within milliseconds, and the request times out after ten seconds.
const BUCKETS: [f64; 10] = [0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 10.0];

/// Handles, all at zero from the start.
pub struct ReviewMetrics {
    reviews: Counters<TokenReview>,
    seconds: Histogram,
    in_flight: IntGauge,
}

impl ReviewMetrics {
    pub(super) fn register(families: &Registrar<'_>) -> Self {
        Self {
            reviews: families.counters_from_zero(
                "token_reviews_total",
                "Token reviews of agents, by result; overload counts tokens not reviewed because too many reviews were waiting",
                "result",
            ),
            seconds: families.histogram(
                "token_review_seconds",
                "Duration of token reviews, excluding the time in the queue",
                &BUCKETS,
            ),
            in_flight: families.gauge("token_reviews_in_flight", "Token reviews that wait for an answer of the Kubernetes API"),
        }
    }
}

impl ReviewEvents for ReviewMetrics {
    fn reviewed(&self, result: ReviewResult, time: Duration) {
        let result = match result {
            ReviewResult::Ok => TokenReview::Ok,
            ReviewResult::Denied => TokenReview::Denied,
            ReviewResult::Error => TokenReview::Error,
            ReviewResult::Timeout => TokenReview::Timeout,
            ReviewResult::Overload => TokenReview::Overload,
        };
        self.reviews.of(result).inc();
        if result != TokenReview::Overload {
            self.seconds.observe(time.as_secs_f64());
        }
    }

    fn in_flight(&self, reviews: usize) {
        self.in_flight
            .set(i64::try_from(reviews).unwrap_or(i64::MAX));
    }
}
