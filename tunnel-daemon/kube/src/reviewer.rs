//! Reviews of tokens, bounded so that many agents and any number of strangers cost the API server little: one review at a
//! time for each token, few at once, and answers cached for seconds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::sha256::Sha256;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use http::Method;
use k8s_openapi::api::authentication::v1::TokenReview;
use tokio::time::Instant;

use crate::access::Api;
use crate::account::ServiceAccount;
pub use crate::fair_slots::Caller;
use crate::fair_slots::{FairSlots, Full, Slot};
use crate::request::{self, RequestError};
use crate::review_policy::{PATH, ReviewError, ReviewPolicy};
use crate::token::{self, Claims, Token};

/// Reviews at once.
const IN_FLIGHT_MAX: usize = 32;
/// Callers that wait for a slot.
const WAITING_MAX: usize = 1024;
/// Longest time for a review, including the wait for a slot: an agent waits 10 s for its answer, and should get the reason.
pub const LIMIT: Duration = Duration::from_secs(9);
/// How long an accepted token is accepted without a review.
const KEEP_ACCEPTED: Duration = Duration::from_secs(10);
/// How long a denied token is refused without a review.
const KEEP_DENIED: Duration = Duration::from_secs(2);
/// Cached answers.
const KEPT_MAX: usize = 8192;

/// How often the API server may be asked.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Rate {
    /// Requests a second in the long run; 0 or less: no limit.
    pub per_second: f32,
    /// Requests at once; 0 or less: 10, as client-go.
    pub burst: i64,
}

/// Outcome of a review.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReviewResult {
    /// The token is let in.
    Ok,
    /// The token is denied.
    Denied,
    /// The API server's answer is unusable.
    Error,
    /// The API server did not answer in time.
    Timeout,
    /// No request was made: too many callers wait.
    Overload,
}

/// Counter of reviews.
pub trait ReviewEvents: Send + Sync {
    /// A review is over. `time` is that of the request; zero for [`ReviewResult::Overload`].
    fn reviewed(&self, result: ReviewResult, time: Duration);
    /// Number of reviews under way.
    fn in_flight(&self, reviews: usize);
}

/// A token's key in the tables: a digest of the token and of the configuration that it was reviewed with.
type Key = [u8; 32];
type Answer = Result<Arc<ServiceAccount>, ReviewError>;
type Pending = BoxFuture<'static, Answer>;

/// Judges tokens. One per process.
pub struct Reviewer(Arc<Inner>);

struct Inner {
    api: Arc<Api>,
    policy: ReviewPolicy,
    limit: Arc<FairSlots>,
    pace: Pace,
    events: Arc<dyn ReviewEvents>,
    tables: Mutex<Tables>,
    /// Whether the last request to the API server failed: changes are logged.
    is_away: Mutex<bool>,
}

#[derive(Default)]
struct Tables {
    kept: HashMap<Key, Kept>,
    pending: HashMap<Key, WeakShared<Pending>>,
}

struct Kept {
    answer: Answer,
    until: Instant,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while these are held; if it did, the tables are still consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reviewer {
    /// A reviewer that asks `api`.
    #[must_use]
    pub fn new(
        api: Arc<Api>,
        policy: ReviewPolicy,
        rate: Rate,
        events: Arc<dyn ReviewEvents>,
    ) -> Self {
        Self(Arc::new(Inner {
            api,
            policy,
            limit: FairSlots::new(IN_FLIGHT_MAX, WAITING_MAX),
            pace: Pace::new(rate),
            events,
            tables: Mutex::default(),
            is_away: Mutex::new(false),
        }))
    }

    /// The service account of a token. Callers with the same token share a review. A cancelled call ends the review, unless
    /// other callers wait for it.
    ///
    /// # Errors
    /// The token is denied, or no review was possible: see [`ReviewError`]. Takes [`LIMIT`] at most.
    pub async fn review(&self, token: &Token, caller: Caller) -> Answer {
        let claims = self.0.policy.check_claims(token, token::now())?;
        let key = self.0.key(token);
        let review = {
            let mut tables = locked(&self.0.tables);
            if let Some(kept) = tables.kept.get(&key)
                && kept.until > Instant::now()
            {
                return kept.answer.clone();
            }
            match tables.pending.get(&key).and_then(WeakShared::upgrade) {
                Some(review) => review,
                None => tables.start(key, Arc::clone(&self.0), token.clone(), claims, caller),
            }
        };
        review.await
    }
}

impl Tables {
    fn start(
        &mut self,
        key: Key,
        inner: Arc<Inner>,
        token: Token,
        claims: Claims,
        caller: Caller,
    ) -> Shared<Pending> {
        let review = async move {
            let answer = inner.ask(&token, caller).await;
            inner.keep(key, &answer, &claims);
            answer
        };
        let review = review.boxed().shared();
        if self.pending.len() >= self.pending.capacity() {
            // Only when the table would grow: cancelled reviews are still in it.
            self.pending
                .retain(|_key, review| review.upgrade().is_some());
        }
        if let Some(weak) = review.downgrade() {
            self.pending.insert(key, weak);
        }
        review
    }
}

impl Inner {
    fn key(&self, token: &Token) -> Key {
        let mut hash = Sha256::default();
        hash.update(token.digest());
        hash.update(self.api.generation().to_be_bytes());
        hash.finish()
    }

    async fn ask(&self, token: &Token, caller: Caller) -> Answer {
        let deadline = Instant::now() + LIMIT;
        let slot = match tokio::time::timeout_at(deadline, self.wait(caller, deadline)).await {
            Ok(Ok(slot)) => slot,
            Ok(Err(Full)) => {
                self.events.reviewed(ReviewResult::Overload, Duration::ZERO);
                return Err(ReviewError::Overload);
            }
            Err(_elapsed) => {
                self.events.reviewed(ReviewResult::Overload, Duration::ZERO);
                return Err(ReviewError::NoSlot);
            }
        };
        let flight = InFlight::begin(self);
        let began = Instant::now();
        let left = deadline.duration_since(began);
        let request = self.policy.request(token);
        let answer = request::send_within::<_, TokenReview>(
            left,
            &self.api,
            Method::POST,
            PATH,
            Some(&request),
        )
        .await;
        self.log_api_server_state(answer.as_ref().err());
        let answer = answer
            .map_err(ReviewError::from)
            .and_then(|review| self.policy.decide(review.status.unwrap_or_default()));
        let result = match &answer {
            Ok(_account) => ReviewResult::Ok,
            Err(ReviewError::Request(RequestError::TimedOut)) => ReviewResult::Timeout,
            Err(ReviewError::Request(_)) => ReviewResult::Error,
            Err(_denied) => ReviewResult::Denied,
        };
        self.events.reviewed(result, began.elapsed());
        drop((flight, slot));
        answer.map(Arc::new)
    }

    async fn wait(&self, caller: Caller, deadline: Instant) -> Result<Slot, Full> {
        let slot = self.limit.acquire(caller).await?;
        self.pace.wait(deadline).await?;
        Ok(slot)
    }

    fn keep(&self, key: Key, answer: &Answer, claims: &Claims) {
        let for_how_long = match answer {
            Ok(_account) => {
                let left = claims.left(token::now()).unwrap_or(KEEP_ACCEPTED);
                KEEP_ACCEPTED.min(left)
            }
            Err(error) if error.is_denial() => KEEP_DENIED,
            Err(_undecided) => Duration::ZERO,
        };
        let now = Instant::now();
        let mut tables = locked(&self.tables);
        tables.pending.remove(&key);
        if for_how_long.is_zero() {
            return;
        }
        if tables.kept.len() >= KEPT_MAX {
            tables.kept.retain(|_key, kept| kept.until > now);
        }
        if tables.kept.len() < KEPT_MAX {
            let kept = Kept {
                answer: answer.clone(),
                until: now + for_how_long,
            };
            tables.kept.insert(key, kept);
        }
    }

    /// Logs once when the API server goes away, and once when it is back.
    fn log_api_server_state(&self, error: Option<&RequestError>) {
        let was_away = std::mem::replace(&mut *locked(&self.is_away), error.is_some());
        match error {
            Some(error) if !was_away => tracing::error!(
                api_server = self.api.address(),
                %error,
                "the Kubernetes API does not review tokens: agents without a link cannot connect until it does; links go on"
            ),
            None if was_away => tracing::info!("the Kubernetes API reviews tokens again"),
            _ => (),
        }
    }
}

/// Counts a review while it is under way, also one that is cancelled.
struct InFlight<'a>(&'a Inner);

impl<'a> InFlight<'a> {
    fn begin(inner: &'a Inner) -> Self {
        inner.events.in_flight(inner.limit.in_use());
        Self(inner)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        // The slot of this review is released after this.
        self.0
            .events
            .in_flight(self.0.limit.in_use().saturating_sub(1));
    }
}

/// `--kubeconfig-qps` and `--kubeconfig-burst`: a token bucket, as a time before which no request may begin.
struct Pace {
    period: Option<Duration>,
    burst: u32,
    /// When the bucket would be full.
    full_at: Mutex<Instant>,
}

impl Pace {
    fn new(rate: Rate) -> Self {
        let per_second = f64::from(rate.per_second);
        Self {
            period: (per_second > 0.0)
                .then(|| Duration::from_secs_f64((1.0 / per_second).min(3600.0))),
            burst: match u32::try_from(rate.burst) {
                Ok(burst) if burst > 0 => burst,
                _ => 10,
            },
            full_at: Mutex::new(Instant::now()),
        }
    }

    /// Waits for the next request's time. A call that is cancelled before gives its share back.
    ///
    /// # Errors
    /// That time is beyond `deadline`; nothing was taken.
    async fn wait(&self, deadline: Instant) -> Result<(), Full> {
        let Some(period) = self.period else {
            return Ok(());
        };
        let begin_at = {
            let now = Instant::now();
            let mut full_at = locked(&self.full_at);
            let next = (*full_at).max(now) + period;
            let begin_at = next.checked_sub(period * self.burst).unwrap_or(now);
            if begin_at > deadline {
                return Err(Full);
            }
            *full_at = next;
            begin_at
        };
        let booked = Booked { pace: self, period };
        tokio::time::sleep_until(begin_at).await;
        std::mem::forget(booked);
        Ok(())
    }
}

/// A request's share of the rate; dropped, it is given back.
struct Booked<'a> {
    pace: &'a Pace,
    period: Duration,
}

impl Drop for Booked<'_> {
    fn drop(&mut self) {
        let mut full_at = locked(&self.pace.full_at);
        *full_at = full_at.checked_sub(self.period).unwrap_or(*full_at);
    }
}
