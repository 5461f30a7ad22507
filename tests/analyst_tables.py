"""Tables that the tests of the analyst's door share."""

import numpy as np
import pandas as pd

FORMULA = "clicked ~ age + C(arm) + C(arm):price"
ARMS = ["A", "B", "C"]


def clicks(n=1200, seed=0, adaptive=False):
    """Clicks with a covariate, three arms and a price; with ``adaptive`` the arm that leads is played more."""
    rng = np.random.default_rng(seed)
    age, price = rng.uniform(18, 90, n), rng.gamma(4.0, 5.0, n)
    arm, clicked = np.empty(n, dtype=int), np.empty(n)
    wins, tries = np.ones(3), 2 * np.ones(3)
    for t in range(n):
        explore = not adaptive or rng.random() < 0.2
        arm[t] = rng.integers(3) if explore else int(np.argmax(wins / tries))
        z = linear_predictor(age[t], arm[t], price[t])
        clicked[t] = rng.random() < 1.0 / (1.0 + np.exp(-z))
        wins[arm[t]] += clicked[t]
        tries[arm[t]] += 1
    return pd.DataFrame(
        {"age": age, "arm": np.array(ARMS)[arm], "price": price, "clicked": clicked.astype(int)}
    )


#: in the order of the columns of FORMULA
TRUTH = np.array([-1.0, 0.02, 0.5, -0.3, 0.0, 0.01, 0.02])


def linear_predictor(age, arm, price):
    return TRUTH[0] + TRUTH[1] * age + np.array([0.0, *TRUTH[2:4]])[arm] + TRUTH[4:][arm] * price
