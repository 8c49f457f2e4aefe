//! How an engine is set up: one structure, whether it is written in code, in a file or in the environment.

use std::path::Path;
use std::time::Duration;

use kvferry_wire::Route;
use serde::{Deserialize, Serialize};

use crate::error::{OptionsError, StartError};
use crate::workers::WORKERS_MAX;

/// In front of the names of options that are given in the environment: `KVFERRY_ENGINE_RANK=3`.
const VARIABLE_PREFIX: &str = "KVFERRY_ENGINE_";

/// Bounds of [`EngineOptions::patience`]: below, nothing could ever answer; above, points in time might not exist.
const PATIENCE_MIN: Duration = Duration::from_millis(1);
const PATIENCE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// How an engine is set up. Start from [`EngineOptions::new`], a file or the environment, and change what you need.
///
/// ```
/// use kvferry::EngineOptions;
///
/// let options = EngineOptions::from_toml("rank = 3\ninstance = 'decode'\npatience_ms = 20_000")?;
/// let options = options.with_environment([("KVFERRY_ENGINE_ROUTE", "landing"), ("HOME", "/root")])?;
/// assert_eq!((options.rank, options.patience.as_secs()), (3, 20));
/// assert_eq!(options.route, Some(kvferry_wire::Route::Landing));
/// # Ok::<(), kvferry::OptionsError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineOptions {
    /// Rank in its instance.
    pub rank: u32,
    /// Name of the instance. A rank that restarts is known again by this and its rank, so instances that one engine is
    /// connected with need different names.
    pub instance: String,
    /// Transports that UCX may use, as in `UCX_TLS`; `None` leaves the choice to UCX and its environment.
    pub transports: Option<String>,
    /// The only route that bytes may take; `None` leaves the choice to what is known of both ends.
    #[serde(with = "route")]
    pub route: Option<Route>,
    /// How long a peer may make no progress before what waits for it fails. No limit on the length of a transfer. Between
    /// a millisecond and a year. In files and the environment: `patience_ms`.
    #[serde(rename = "patience_ms", with = "millis")]
    pub patience: Duration,
    /// How long an answer is waited for before a message is sent again; twice as long each time. At least a millisecond, at
    /// most the patience, or the default of 200 ms if that is longer. In files and the environment: `resend_ms`.
    #[serde(rename = "resend_ms", with = "millis")]
    pub resend: Duration,
    /// Receives, and as many sends, that may be under way or not quiet yet.
    pub requests_max: usize,
    /// Whether checksums are made of what is sent and compared with what has arrived. Costs a pass over the bytes on each
    /// side, by a thread of its own. Both sides must have it alike. The patience must be longer than the other side needs for the
    /// sums of all that is under way.
    pub verify: bool,
    /// Memory that each worker sets aside for peers that cannot write to this rank's memory themselves, in bytes. Taken when
    /// first used.
    pub inbox_bytes: u64,
    /// Bytes that travel to such memory at a time.
    pub chunk_bytes: u32,
    /// Memory through which messages go to a peer on this host, in bytes: for each connection and direction, taken when first used. At
    /// most 1 MiB; with 0 they go by UCX.
    pub ring_bytes: u32,
    /// Workers, from 1 to 64, each with a progress thread and an inbox of its own. Peers are dealt out to them: more than one is of
    /// use with several peers, and a core for each. Other ranks may have another number.
    pub workers: usize,
    /// Threads that copy into memory of peers on the host.
    pub copy_threads: usize,
    /// Processors to keep the progress threads on, one for each worker in turn. Empty leaves them to the system, and lets a
    /// thread that waits or polls make progress in their place.
    pub cpus: Vec<usize>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            rank: 0,
            instance: String::new(),
            transports: None,
            route: None,
            patience: Duration::from_secs(30),
            resend: Duration::from_millis(200),
            requests_max: 1 << 16,
            verify: false,
            inbox_bytes: 64 << 20,
            chunk_bytes: 256 << 10,
            ring_bytes: 64 << 10,
            workers: 1,
            copy_threads: 1,
            cpus: Vec::new(),
        }
    }
}

impl EngineOptions {
    /// The options of a rank, with everything else at its default.
    #[must_use]
    pub fn new(rank: u32) -> Self {
        Self { rank, ..Self::default() }
    }

    /// Reads JSON. What is not given is at its default.
    ///
    /// # Errors
    ///
    /// [`OptionsError::Json`].
    pub fn from_json(text: &str) -> Result<Self, OptionsError> {
        Ok(serde_json::from_str(text)?)
    }

    /// Reads TOML. What is not given is at its default.
    ///
    /// # Errors
    ///
    /// [`OptionsError::Toml`].
    pub fn from_toml(text: &str) -> Result<Self, OptionsError> {
        Ok(toml::from_str(text)?)
    }

    /// Reads a file that is called `*.json` or `*.toml`.
    ///
    /// # Errors
    ///
    /// [`OptionsError`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, OptionsError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|source| OptionsError::File { path: path.into(), source });
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => Self::from_json(&text?),
            Some("toml") => Self::from_toml(&text?),
            _ => Err(OptionsError::Format { path: path.into() }),
        }
    }

    /// Takes what is set in an environment, `std::env::vars()` say: variables called `KVFERRY_ENGINE_` and the name of an
    /// option in capitals. Values are as in JSON, or text as it is.
    ///
    /// # Errors
    ///
    /// [`OptionsError::Variable`]: there is no such option, or it cannot have that value.
    pub fn with_environment<K: AsRef<str>, V: AsRef<str>>(
        mut self,
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, OptionsError> {
        for (variable, value) in variables {
            let (variable, value) = (variable.as_ref(), value.as_ref());
            let Some(name) = variable.strip_prefix(VARIABLE_PREFIX) else { continue };
            let set = |parsed: serde_json::Value| -> Result<Self, serde_json::Error> {
                let mut options = serde_json::to_value(&self)?;
                options[name.to_lowercase()] = parsed;
                serde_json::from_value(options)
            };
            let text = || serde_json::Value::String(value.to_owned());
            // A name may look like a number: it is text if it cannot be what it looks like.
            let parsed = serde_json::from_str(value).unwrap_or_else(|_| text());
            self = set(parsed).or_else(|error| set(text()).map_err(|_| error)).map_err(|source| {
                OptionsError::Variable { variable: variable.to_owned(), value: value.to_owned(), source }
            })?;
        }
        Ok(self)
    }

    /// Sets the name of the instance.
    #[must_use]
    pub fn instance(self, instance: impl Into<String>) -> Self {
        Self { instance: instance.into(), ..self }
    }

    /// Sets the transports that UCX may use.
    #[must_use]
    pub fn transports(self, transports: impl Into<String>) -> Self {
        Self { transports: Some(transports.into()), ..self }
    }

    /// Sets the only route that bytes may take.
    #[must_use]
    pub fn route(self, route: Route) -> Self {
        Self { route: Some(route), ..self }
    }

    /// Sets how long a peer may make no progress.
    #[must_use]
    pub fn patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Sets the number of workers.
    #[must_use]
    pub fn workers(self, workers: usize) -> Self {
        Self { workers, ..self }
    }

    /// Sets whether checksums are made and compared.
    #[must_use]
    pub fn verify(self, verify: bool) -> Self {
        Self { verify, ..self }
    }

    pub(crate) fn check(&self) -> Result<(), StartError> {
        let Self { patience, resend, workers, .. } = *self;
        if !(1..=WORKERS_MAX).contains(&workers) {
            return Err(StartError::Workers { workers });
        }
        if !(PATIENCE_MIN..=PATIENCE_MAX).contains(&patience) {
            return Err(StartError::Patience(patience));
        }
        if !(PATIENCE_MIN..=patience.max(Self::default().resend)).contains(&resend) {
            return Err(StartError::Resend { resend, patience });
        }
        Ok(())
    }
}

/// Times as whole milliseconds.
mod millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        u64::try_from(time.as_millis()).unwrap_or(u64::MAX).serialize(serializer)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_millis)
    }
}

/// Routes by their names.
mod route {
    use kvferry_wire::Route;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    const ROUTES: [Route; 4] = [Route::Direct, Route::Landing, Route::Staged, Route::Runs];

    pub(super) fn serialize<S: Serializer>(route: &Option<Route>, serializer: S) -> Result<S::Ok, S::Error> {
        route.map(|route| route.to_string()).serialize(serializer)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Option<Route>, D::Error> {
        let Some(name) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
        let route = ROUTES.into_iter().find(|route| route.to_string() == name);
        route.map(Some).ok_or_else(|| de::Error::unknown_variant(&name, &["direct", "landing", "staged", "runs"]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_environment_make_the_same_options_as_code() {
        let expected = EngineOptions::new(3)
            .instance("7")
            .transports("tcp")
            .route(Route::Staged)
            .patience(Duration::from_millis(1500))
            .verify(true);
        let json = r#"{"rank": 3, "instance": "7", "transports": "tcp", "route": "staged", "patience_ms": 1500,
            "verify": true}"#;
        assert_eq!(EngineOptions::from_json(json).unwrap(), expected);
        assert_eq!(EngineOptions::from_json(&serde_json::to_string(&expected).unwrap()).unwrap(), expected);
        let variables = ["RANK=3", "INSTANCE=7", "TRANSPORTS=tcp", "ROUTE=staged", "PATIENCE_MS=1500", "VERIFY=true"];
        let variables = variables.map(|variable| variable.split_once('=').unwrap());
        let variables = variables.map(|(name, value)| (format!("KVFERRY_ENGINE_{name}"), value));
        assert_eq!(EngineOptions::default().with_environment(variables).unwrap(), expected);
    }

    #[test]
    fn what_there_is_not_is_refused_by_name() {
        assert!(EngineOptions::from_toml("ranks = 3").is_err());
        assert!(EngineOptions::from_json(r#"{"route": "teleport"}"#).is_err());
        for (variable, value) in [("KVFERRY_ENGINE_RANKS", "3"), ("KVFERRY_ENGINE_RANK", "three")] {
            let error = EngineOptions::default().with_environment([(variable, value)]).unwrap_err();
            assert!(error.to_string().starts_with(variable), "{error}");
        }
        assert!(matches!(EngineOptions::from_file("/no/options.yaml"), Err(OptionsError::Format { .. })));
        assert!(matches!(EngineOptions::from_file("/no/options.toml"), Err(OptionsError::File { .. })));
    }
}
