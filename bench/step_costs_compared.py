"""The shared model of time beside each of those that it replaces, on 1,000 random points.

PYTHONPATH=. python compare.py OLD_TREE
"""

import importlib.util, math, random, statistics, subprocess, sys, types

OLD = sys.argv[1]


def old(path, name, **replaced):
    source = open(f"{OLD}/{path}").read()
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return module


from baton.perf_model.curve import NO_CURVE, Curve
from baton.perf_model.decode_fit import DecodeFit
from baton.perf_model.messages import from_message, to_message
from baton.perf_model.prefill_fit import PrefillFit, TimedPass
from baton.perf_model.step_costs import StepCosts

N = 1000


def show(name, pairs):
    errors = [(abs(new / was - 1) if was else abs(new)) for was, new, _ in pairs]
    over = sum(e > 1e-9 for e in errors)
    worst = max(range(len(errors)), key=errors.__getitem__)
    big = sum(e > 0.01 for e in errors)
    print(
        f"{name:66} {len(pairs):5} points: equal to 1e-9 at {len(pairs) - over:4}; above 1 % at {big:4}; median {100 * statistics.median(errors):.3g} %, worst {100 * errors[worst]:.3g} %"
        + (f" at {pairs[worst][2]}" if errors[worst] > 1e-9 else "")
    )


# 1. engine, decode: the curve of padded batches, then the fit
dc = old("baton/engine/decode/cost.py", "old_decode_cost")
draw = random.Random(1)
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def measured():
    base, each = draw.uniform(2e-3, 2e-2), draw.uniform(1e-6, 1e-4)
    seconds = [base + each * b * draw.uniform(0.9, 1.1) for b in BATCHES]
    reading = draw.uniform(5e-9, 1e-7)
    return seconds, reading


pairs, fits, wire = [], [], []
for _ in range(N // 20):
    seconds, reading = measured()
    curve = dc.StepCurve.of_batches(BATCHES, seconds, reading)
    costs = StepCosts.of_batches(BATCHES, seconds, reading)
    was, fit = dc.DecodeCost(curve), DecodeFit(costs)
    pace = draw.uniform(0.9, 1.08)
    for _ in range(20):
        n = draw.uniform(1, 270)
        ctx = n * draw.uniform(50, 8000)
        rates = dc.DecodeRates(curve.first_s, 0.0, reading, curve)
        pairs.append((rates.seconds(n, ctx), costs.decode_s(n, ctx), (round(n), round(ctx))))
        took = pace * rates.seconds(n, ctx) * draw.uniform(0.97, 1.03)
        was.observe(n, ctx, took)
        fit.observe(n, ctx, took)
        n = draw.randint(1, 256)
        ctx = n * draw.randint(50, 8000)
        fits.append((was.rates().seconds(n, ctx), fit.costs.decode_s(n, ctx), (n, ctx)))
        wire.append(
            (fit.costs.decode_s(n, ctx), from_message(to_message(fit.costs)).decode_s(n, ctx), (n, ctx))
        )
show("engine DecodeRates of a start's curve / StepCosts.decode_s", pairs)
show("engine DecodeCost after measured steps / DecodeFit", fits)
show("engine's prediction / the router's of its heartbeat (whole numbers)", wire)

# 2. engine, prefill
pc = old("baton/engine/prefill/cost.py", "old_prefill_cost")
steps, units, reported = [], [], []
for _ in range(N // 20):
    half, least = draw.uniform(3e3, 6e4), draw.choice((0, 224))
    was, fit = pc.PrefillCost(half, least), PrefillFit(half, least)
    unit, slow = draw.uniform(1e-5, 1e-4), draw.uniform(0.8, 4)
    passes = (pc.TimedPass(64, unit * draw.uniform(64, 500)), pc.TimedPass(2048, unit * 2048))
    was.begin(*passes)
    fit.begin(*passes)
    for _ in range(20):
        chunks = [
            (draw.choice((0, draw.randint(0, 60000))), draw.randint(1, 1024))
            for _ in range(draw.randint(1, 4))
        ]
        mixed = draw.random() < 0.3
        took = unit * sum(c + slow * c * (s + c / 2) / half for s, c in chunks) * draw.uniform(0.95, 1.05)
        was.took(chunks, took, mixed=mixed)
        fit.took(chunks, took, mixed=mixed)
        asked = [(draw.randint(0, 60000), draw.randint(1, 2048)) for _ in range(draw.randint(1, 4))]
        steps.append(
            (was.seconds_of_step(asked, mixed=mixed), fit.seconds_of_step(asked, mixed=mixed), asked)
        )
        units.append((was.tokens_within(asked[0][0], 1000), fit.tokens_within(asked[0][0], 1000), asked[0]))
        costs = fit.added_to(StepCosts())
        if not fit._few_mixed:
            reported.append((was.seconds_of_step(asked), costs.prefill_s(asked), asked))
show("engine PrefillCost.seconds_of_step / PrefillFit", steps)
show("engine PrefillCost.tokens_within / PrefillFit", units)
show("engine PrefillCost.seconds_of_step / StepCosts.prefill_s as reported", reported)

# 3. router
subprocess  # proto of the old tree has another name of the message; a stand-in has its fields


class Rates:
    pass


source = open(f"{OLD}/services/router/placement/forecast.py").read()
fc = types.ModuleType("old_forecast")
sys.modules["old_forecast"] = fc
source = source.replace(
    "from baton.v1.worker_pb2 import DescribeResponse, Rates",
    "from baton.v1.worker_pb2 import DescribeResponse\nRates = object",
)
exec(compile(source, "forecast", "exec"), fc.__dict__)
from services.router.workers.decode_load import DecodeLoad
import services.router.placement.forecast as nf

p0, pc_, ds, each, within = [], [], [], [], []


class W:
    pass


for _ in range(N):
    r = Rates()
    r.prefill_token_s, r.prefill_step_s = draw.uniform(1e-5, 1e-4), draw.uniform(1e-3, 1e-2)
    r.prefill_half_context = draw.choice((0, draw.uniform(3e3, 6e4)))
    r.decode_step_s, r.decode_sequence_s, r.decode_context_token_s = (
        draw.uniform(2e-3, 2e-2),
        draw.uniform(0, 1e-4),
        draw.uniform(0, 1e-7),
    )
    at = [1, *sorted(draw.sample(range(2, 257), draw.randint(1, 12)))] if draw.random() < 0.7 else []
    r.decode_curve_sequences = at
    r.decode_curve_s = [0.0, *sorted(draw.uniform(0, 1e-2) for _ in at[1:])] if at else []
    c = StepCosts(
        r.prefill_token_s,
        r.prefill_step_s,
        r.prefill_half_context or math.inf,
        r.decode_step_s,
        r.decode_sequence_s,
        r.decode_context_token_s,
        Curve(tuple(at), tuple(r.decode_curve_s)) if at else NO_CURVE,
    )
    w = W()
    w.described = types.SimpleNamespace(load=types.SimpleNamespace(rates=r))
    w.costs = c
    t = draw.randint(1, 16000)
    p0.append((fc.prefill_s(w, t), c.prompt_s(t), (t, 0)))
    cached = draw.randint(0, t)
    pc_.append(
        (
            fc.prefill_s(w, t, cached),
            c.prompt_s(t, cached),
            (t, cached, round(r.prefill_step_s / r.prefill_token_s), round(r.prefill_half_context)),
        )
    )
    load = DecodeLoad(draw.uniform(0, 260), draw.uniform(0, 2e6), draw.uniform(0, 1))
    ds.append((fc.loaded_step_s(r, load), nf.loaded_step_s(c, load), load))
    ctx = draw.randint(0, 8000)
    each.append((fc.each_s(w, ctx), c.each_s(ctx), ctx))
    w.free_slots, w.used_slots, w.context_tokens, w.staying = (
        draw.randint(0, 256),
        draw.randint(0, 100),
        draw.randint(0, 200000),
        draw.random(),
    )
    w.prefill_share = types.SimpleNamespace(after=lambda s, v=draw.random(): v)
    w.tpot_ratio = types.SimpleNamespace(value=draw.uniform(0.8, 1.25))
    limit = draw.uniform(2e-3, 4e-2)
    within.append((fc.sequences_within(w, limit, ctx), nf.sequences_within(w, limit, ctx), limit))
show("router prefill_s, nothing cached / StepCosts.prompt_s", p0)
show("router prefill_s, a part cached / StepCosts.prompt_s", pc_)
show("router loaded_step_s, _curve_s / StepCosts.token_s", ds)
show("router each_s, sequence_s / StepCosts.each_s", each)
show("router sequences_within", within)

# 4. loadgen size
if importlib.util.find_spec("baton.perf_model.profile"):
    from baton.perf_model.profile import read_profile, shipped

    lr = types.ModuleType("old_rates")
    sys.modules["old_rates"] = lr
    src = (
        open(f"{OLD}/loadgen/sizing/rates.py")
        .read()
        .replace('resources.files("loadgen.sizing") / "rates"', f'Path("{OLD}/loadgen/sizing/rates")')
    )
    exec(compile(src, "rates", "exec"), lr.__dict__)
    lr.Rates.model_rebuild(_types_namespace=lr.__dict__)
    for name in shipped():
        was, profile = lr.read_rates(name), read_profile(name)
        c = profile.costs
        ins, short, beyond, prompts = [], [], [], []
        for _ in range(N):
            b = draw.uniform(1, was.max_batch)
            ctx = draw.uniform(was.decode_context, 8000)
            ins.append((was.step_s(b, ctx), c.token_s(b, b * ctx), (round(b), round(ctx))))
            ctx = draw.uniform(1, was.decode_context)
            short.append((was.step_s(b, ctx), c.token_s(b, b * ctx), (round(b), round(ctx))))
            b = draw.uniform(was.max_batch, 2 * was.max_batch)
            ctx = draw.uniform(500, 4000)
            beyond.append((was.step_s(b, ctx), c.token_s(b, b * ctx), (round(b), round(ctx))))
            t = draw.uniform(1, 30000)
            prompts.append((was.prefill_s(t), c.prompt_s(t), round(t)))
        show(f"loadgen {name} step_s, contexts as measured and longer", ins)
        show(f"loadgen {name} step_s, shorter contexts", short)
        show(f"loadgen {name} step_s, batches beyond the largest measured", beyond)
        show(f"loadgen {name} prefill_s", prompts)

# 5. tests: modelled_cluster, modelled_prefill
RATES = dict(
    prefill_token_s=23.4e-6,
    prefill_step_s=5e-3,
    prefill_half_context=26_600,
    decode_step_s=4.9e-3,
    decode_sequence_s=1e-5,
    decode_context_token_s=2.7e-8,
)
c, R = StepCosts(**RATES), types.SimpleNamespace(**RATES)
a, b, d = [], [], []
for _ in range(N):
    t = draw.randint(1, 16000)
    u = t + t * t / 2 / R.prefill_half_context
    a.append((max(R.prefill_step_s, u * R.prefill_token_s), c.prompt_s(t), t))
    runs = [(draw.randint(0, 16000), draw.randint(1, 1024)) for _ in range(draw.randint(1, 4))]
    u = sum(n + n * (s + n / 2) / R.prefill_half_context for s, n in runs)
    b.append((max(R.prefill_step_s, u * R.prefill_token_s), c.prefill_s(runs), runs))
    n = draw.randint(0, 256)
    x = n * draw.randint(1, 8000)
    d.append(
        (R.decode_step_s + n * R.decode_sequence_s + x * R.decode_context_token_s, c.token_s(n, x), (n, x))
    )
show("tests' Machine.prefill / StepCosts.prompt_s", a)
show("tests' ModelledPrompts._seconds / StepCosts.prefill_s", b)
show("tests' Machine.step_s / StepCosts.token_s", d)

# 6. bench.goodput --ideal: the same arrivals through the old simulators and the new one
if importlib.util.find_spec("bench.goodput.ideal_cluster"):
    from bench.goodput.ideal_cluster import Workers, simulate

    sys.modules["loadgen.sizing.rates"] = lr
    oi = types.ModuleType("old_ideal")
    sys.modules["bench.goodput.ideal"] = oi
    oi.__dict__["__name__"] = "bench.goodput.ideal"
    exec(compile(open(f"{OLD}/bench/goodput/ideal.py").read(), "ideal", "exec"), oi.__dict__)
    os_ = types.ModuleType("bench.goodput.shared_ideal")
    sys.modules["bench.goodput.shared_ideal"] = os_
    exec(compile(open(f"{OLD}/bench/goodput/shared_ideal.py").read(), "shared", "exec"), os_.__dict__)
    was, costs = lr.read_rates("8b-h200"), read_profile("8b-h200").costs
    for arm, rate, tpot in (
        ((1, 1, 0), 30, 0),
        ((2, 3, 0), 60, 0),
        ((1, 0, 1), 40, 0.012),
        ((0, 0, 2), 36, 0.012),
        ((2, 0, 2), 70, 0.008),
        ((1, 1, 0), 60, 0),
    ):
        at, arrivals = 0.0, []
        for _ in range(N):
            at += draw.expovariate(rate)
            arrivals.append(oi.Arrival(at, draw.randint(200, 2000), draw.randint(1, 500)))
        new = simulate(arrivals, costs, Workers(*arm, tpot or math.inf))

        def before(r):
            return (
                os_.simulate_shared(arrivals, r, arm[0], arm[2], tpot)
                if arm[2]
                else oi.simulate(arrivals, r, arm[0], arm[1])
            )

        class Same:  # the new costs behind the old simulators
            prefill_s = staticmethod(costs.prompt_s)
            step_s = staticmethod(lambda b, c: costs.token_s(b, round(b * c)))

        name = f"ideal of {arm[0]}p{arm[1]}d{arm[2]}both, {rate}/s"
        was_same = before(Same)
        show(
            name + ", same costs, TTFT",
            [(o.ttft_s, n.ttft_s, i) for i, (o, n) in enumerate(zip(was_same, new))],
        )
        show(
            name + ", same costs, TPOT",
            [(o.tpot_s, n.tpot_s, i) for i, (o, n) in enumerate(zip(was_same, new))],
        )
        mean = lambda found, what: statistics.mean(getattr(one, what) for one in found)
        old_ = before(was)
        print(
            f"{name}, each with its own costs: mean TTFT {1e3 * mean(old_, 'ttft_s'):.3f} / {1e3 * mean(new, 'ttft_s'):.3f} ms, mean TPOT {1e3 * mean(old_, 'tpot_s'):.4f} / {1e3 * mean(new, 'tpot_s'):.4f} ms"
        )
