//! Series of token reviews.

use std::time::Duration;

use adit_kube::reviewer::{ReviewEvents, ReviewResult};
use prometheus::Histogram;

use crate::families::{Counters, Gauge, Registrar, families};
use crate::labels::TokenReview;

/// Upper bounds in seconds: an API server answers within milliseconds, and the request times out after ten seconds.
const BUCKETS: [f64; 10] = [0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 10.0];

families! {
    /// Handles, all at zero from the start.
    pub struct ReviewMetrics(families) {
        /// Token reviews of agents, by result; overload counts tokens not reviewed because too many reviews were waiting
        reviews: Counters<TokenReview> = families.counters_from_zero("token_reviews_total", "result"),
        /// Duration of token reviews, excluding the time in the queue
        seconds: Histogram = families.histogram("token_review_seconds", &BUCKETS),
        /// Token reviews that wait for an answer of the Kubernetes API
        in_flight: Gauge = families.gauge("token_reviews_in_flight"),
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
        self.reviews.count(result);
        if result != TokenReview::Overload {
            self.seconds.observe(time.as_secs_f64());
        }
    }

    fn in_flight(&self, reviews: usize) {
        self.in_flight.set(reviews);
    }
}
